"""Asks how much memory a program needs, by running it on a simulated GPU."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _command

# `fit` fills the value of this variable, which the program ignores. It is also set in the program, so that a
# program that calls `estimate` without end is noticed.
_VARIABLE = "ESTIMATED_BY_MEMTRACE"


class Estimate:
    """The memory of a program on a simulated card, in bytes, as it was when the program ran there.

    `fits()` is False if the program ran out of memory on `card`. Its figures then end where that happened.
    """

    def __init__(self, ask: Callable[[str], dict[str, Any]], card: str) -> None:
        self._ask = ask
        self.card = card
        answer = ask(card)
        trial = answer["trials"][0]
        self.device: str = answer["device"]
        self.capacity_bytes: int = answer["capacity_bytes"]
        self.peak_allocated_bytes: int = trial["peak_allocated_bytes"]
        self.peak_reserved_bytes: int = trial["peak_reserved_bytes"]
        self.peak_used_bytes: int = trial["peak_used_bytes"]
        self.peak_host_bytes: int = trial["peak_host_bytes"]
        self.owners: dict[str, int] = trial["at_peak_by_category_bytes"]
        self.modules: dict[str, int] = answer["modules"]
        self._fits = {card: trial["outcome"] == "fits"}

    def fits(self, card: str | None = None) -> bool:
        """Returns whether the program fits on `card`, by default on the card of the estimate. The program
        runs once on each other card.

        Raises TraceError if the card is unknown or the program fails there for another reason than memory."""
        card = card or self.card
        if card not in self._fits:
            self._fits[card] = self._ask(card)["trials"][0]["outcome"] == "fits"
        return self._fits[card]

    def __repr__(self) -> str:
        gib = [f"{bytes / (1 << 30):.2f} GiB" for bytes in (self.peak_allocated_bytes, self.peak_used_bytes)]
        outcome = "fits" if self.fits() else "out of memory"
        return f"<Estimate on {self.card}: {outcome}, {gib[0]} allocated, {gib[1]} used>"


def estimate(
    program: str | os.PathLike[str] | Callable[[], object] | None = None,
    *,
    recipe: str | None = None,
    model: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    settings: Mapping[str, object] | None = None,
    arguments: Sequence[object] = (),
    card: str = "h100-80g",
) -> Estimate:
    """Runs a program on a simulated card, and returns how much memory it needs and who holds it.

    `program` is the path of a script, which gets `arguments` as text, or a function without arguments that
    trains. The function runs in a new process that imports its file, so a call of `estimate` in the same file
    belongs under `if __name__ == "__main__":`. `functools.partial` gives it arguments.
    Or name a `recipe` of `memtrace fit` and a `model`, with `batch` (1 by default), `seq` (tokens or pixels)
    and `settings`. The recipe `serve` has no estimate, because vLLM fills the card at any batch.

    Raises TraceError if the request is invalid, names several cards or lengths, or has an argument without
    effect, or if the program fails for another reason than memory.
    """
    if _VARIABLE in os.environ:
        raise _command.TraceError(
            "the program that memtrace.estimate runs calls it again; put the call under "
            'if __name__ == "__main__":'
        )
    if (program is None) == (recipe is None) or (recipe is None) != (model is None):
        raise _command.TraceError("estimate: give a program, or a recipe and a model")
    of_recipe = {"batch": batch, "seq": seq, "settings": settings}
    given = [name for name, value in of_recipe.items() if value is not None]
    if recipe is None and given:
        raise _command.TraceError(f"estimate: only a recipe takes {', '.join(given)}")
    if arguments and (recipe is not None or callable(program)):
        raise _command.TraceError(
            "estimate: only a script takes arguments; a recipe has settings, and a function functools.partial"
        )
    if recipe == "serve":
        raise _command.TraceError(
            "estimate: vLLM fills the card at any batch; memtrace fit --recipe serve prints its KV cache"
        )
    if recipe is not None:
        words = ["--recipe", recipe, "--model", str(model), "--values", str(1 if batch is None else batch)]
        if seq is not None:
            words += ["--seq", str(seq)]
        for name, value in (settings or {}).items():
            words += ["--set", f"{name}={value}"]
        return Estimate(lambda card: _run(card, lambda folder: _recipe_request(words)), card)
    if callable(program):
        call = _pickled(program)
        words = [str(Path(__file__).with_name("_call.py"))]
    else:
        call = None
        words = [os.fspath(program), *map(str, arguments)]  # type: ignore[arg-type]
    return Estimate(lambda card: _run(card, lambda folder: _program_request(words, call, folder)), card)


def _pickled(function: Callable[[], object]) -> bytes:
    main = getattr(sys.modules["__main__"], "__file__", None)
    try:
        call = pickle.dumps(function)
    except Exception as error:
        raise _command.TraceError(
            f"estimate: the function cannot be passed to another process: {error}; "
            "define it at the top of a file"
        ) from None
    if main is None and b"__main__" in call:
        raise _command.TraceError("estimate: the function is defined at a prompt; define it in a file")
    return pickle.dumps((sys.path, main and os.path.abspath(main), call))


# The words of a request after those that all requests have, and its environment.
_Request = tuple[list[str], dict[str, str]]


def _recipe_request(words: list[str]) -> _Request:
    """Returns the request for a recipe, which runs with this Python."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return words, {**os.environ, "PATH": path}


def _program_request(words: list[str], call: bytes | None, folder: str) -> _Request:
    """Returns the request for a program of this Python. Its last argument is a file with `call`, if there is
    one."""
    if call is not None:
        file = Path(folder, "call")
        file.write_bytes(call)
        words = [*words, str(file)]
    # In a file, because `fit` would replace `{}` in the words.
    script = Path(folder, "program")
    script.write_text(f"exec {shlex.join([sys.executable, *words])}\n")
    return ["--values", "once", "--", "env", f"{_VARIABLE}={{}}", "sh", str(script)], dict(os.environ)


def _run(card: str, request_in: Callable[[str], _Request]) -> dict[str, Any]:
    """Runs the program once on a card. Returns the answer of `memtrace fit`, with the modules at the peak.

    `request_in` returns the request, whose files are in the folder that it is given."""
    with tempfile.TemporaryDirectory(prefix="memtrace-estimate-") as folder:
        out = os.path.join(folder, "out")
        words, environment = request_in(folder)
        options = ["--json", "--phantom", card, "--jobs", "1", "-o", out]
        result = _command.run(["fit", *options, *words], environment)
        answer: dict[str, Any] = json.loads(result.stdout)
        if "rows" in answer:
            raise _command.TraceError("estimate: name one card and one length; `fits` takes another card")
        trial = answer["trials"][0] if answer["trials"] else {}
        if trial.get("outcome") not in ("fits", "out of memory") or not trial["processes"]:
            tail = " ".join(trial.get("stderr_tail") or [answer.get("stopped") or "no run"])
            raise _command.TraceError(f"estimate: the program failed: {tail[-500:]}")
        groups: list[dict[str, Any]] = []
        if trial["peak_allocated_bytes"]:
            # The folder is absolute, because `-o` is.
            groups = _command.answer(["peak", "--by=module", "--", trial["folder"]])[0]["groups"]
        answer["modules"] = {group["key"]: group["bytes"] for group in groups}
        return answer
