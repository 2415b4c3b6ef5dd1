"""Returns the answers of the reports as objects and tables."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from typing import Any

from . import _command, _frames
from ._read import DEFAULT, Trace


class Answer(dict[str, Any]):
    """The answer of a report: a dict with the fields of its `--json`, which docs/json.md describes.

    `text` is the text that the command prints, and `table()` returns a list in the answer as a DataFrame.
    `status` is the exit status of the command: 0, or 1 if `check` found a problem, or 3 if a limit was
    exceeded. A notebook shows the command's text.

    >>> answer = peak("gpt", by="module")
    >>> answer["groups"][0]["key"]
    'GPT.head'
    >>> len(answer.table("groups"))
    23
    >>> "peak of allocated memory 119.00 MiB" in answer.text
    True
    """

    def __init__(self, fields: dict[str, Any], status: int, arguments: list[str]) -> None:
        super().__init__(fields)
        self.status = status
        self._arguments = arguments
        self._text: str | None = None

    @property
    def text(self) -> str:
        """Returns the text that the command prints. The first use runs the command again."""
        if self._text is None:
            self._text = _command.run(self._arguments).stdout
        return self._text

    def lists(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the lists of objects in the answer, by names such as `processes` or `processes.devices`.
        Each object also has the numbers and texts of the objects around it, and the fields of inner objects
        as `peak.bytes`."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path, row in _rows(self, "", {}):
            found.setdefault(path, []).append(row)
        return found

    def table(self, name: str | None = None, *, backend: str | None = None) -> Any:
        """Returns a DataFrame of the list `name`, by default of the longest list.

        Raises KeyError if the answer has no such list."""
        lists = self.lists()
        if name is None:
            name = max(lists, key=lambda path: len(lists[path]), default=None)
            if name is None:
                return _frames.frame([], backend)
        if name not in lists:
            raise KeyError(f"no list {name!r} in this answer; it has {', '.join(lists) or 'none'}")
        return _frames.frame(lists[name], backend)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def _rows(node: dict[str, Any], path: str, around: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of each list below `node` as flat rows, with the path of their list."""
    own = {**around, **_flat(node)} if path else {}
    for key, value in node.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            below = f"{path}.{key}" if path else key
            for item in value:
                yield below, {**own, **_flat(item)}
                yield from _rows(item, below, own)


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the numbers and texts of an object and of the objects in it, but not its lists."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif not isinstance(value, list):
            flat[prefix + key] = value
    return flat


def _answer(report: str, traces: list[Trace], options: dict[str, Any]) -> Answer:
    """Returns the answer of `memtrace REPORT TRACES`, with an option of the command for each of `options`."""
    # After `--`, a trace may have any name.
    arguments = [report, *_command.options(options), "--", *(os.fspath(trace) for trace in traces)]
    fields, status = _command.answer(arguments)
    return Answer(fields, status, arguments)


def summary(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the peaks of each process, their time and owner, and counts of events, steps and ranks.

    `options` are the options of `memtrace summary`, with `_` for `-`.

    >>> summary("gpt")["processes"][0]["steps"]
    4"""
    return _answer("summary", [trace], options)


def peak(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the live blocks at the peak, by owner: `by` is module, op, category, phase, step, size, line,
    stack, type, dtype or shape.

    `at="end"` lists the blocks at another moment; `mem_tracker=True` adds the sums by type of torch's
    MemTracker.
    `options` are the options of `memtrace peak`, with `_` for `-`.

    >>> answer = peak("gpt", by="category")
    >>> answer["peak"]["bytes"]
    124781568
    >>> answer["groups"][0]["key"], answer["groups"][0]["bytes"]
    ('activation', 57185280)"""
    return _answer("peak", [trace], options)


def oom(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the reason why the run ran out of memory, with the request, the free memory, the cause and the
    remedies.

    `options` are the options of `memtrace oom`, with `_` for `-`.

    >>> oom("oom-big")["ooms"][0]["verdict"]
    'too big'"""
    return _answer("oom", [trace], options)


def ledger(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the memory that nvidia-smi shows, split into torch, its cache,
    libraries, the context and others.

    `options` are the options of `memtrace ledger`, with `_` for `-`.

    >>> largest = ledger("gpt")["devices"][0]["rows"][0]
    >>> largest["held_by"], largest["bytes"]
    ('torch: activation', 34603012)
    """
    return _answer("ledger", [trace], options)


def serving(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns a model server's memory on each device, split into weights, KV cache, activations, graphs,
    NCCL, context and free memory.

    `options` are the options of `memtrace serving`, with `_` for `-`."""
    return _answer("serving", [trace], options)


def modules(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the memory before, at the peak of and after each module call, as torch's MemTracker counts it.

    `options` are the options of `memtrace modules`, with `_` for `-`."""
    return _answer("modules", [trace], options)


def ops(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the ops that allocated the most memory, by op and module and by call,
    and the allocator's retries.

    With `actions=True`, returns the blocks created, changed in place and destroyed, by torch.profiler's
    categories.
    `options` are the options of `memtrace ops`, with `_` for `-`."""
    return _answer("ops", [trace], options)


def frag(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the reserved memory that is not in use (rounding, holes and empty segments), and the
    blocks that pin segments.

    `options` are the options of `memtrace frag`, with `_` for `-`."""
    return _answer("frag", [trace], options)


def leaks(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the memory that grows from step to step, its rate and owner, and the memory that was never
    freed.

    With `holders=True`, also returns the Python objects that keep memory of earlier steps.
    `memtrace.retained()` searches this process.
    `options` are the options of `memtrace leaks`, with `_` for `-`.

    >>> growth = leaks("leaks")["processes"][0]["growth"][0]
    >>> growth["cause"], growth["forecast"]["bytes_per_unit"], growth["forecast"]["unit"]
    ('kept', 3145728.0, 'step')
    """
    return _answer("leaks", [trace], options)


def ranks(
    trace: Trace | list[Trace] = DEFAULT, *, engine: str | None = None, **options: Any
) -> Answer | dict[str, Any]:
    """Returns the peaks of all ranks, their skew, and the first module in which they differ.

    `options` are the options of `memtrace ranks`, with `_` for `-`. With an `engine`, the ranks are compared
    from digests of their traces. "local" makes the digests in this process, "ray" on a Ray cluster with one
    task per trace.
    `trace` may then be a list of folders and patterns. The options are `every_node` (each node searches its
    own disk), `top` (lines of each list), `keep` (a folder for the digests) and `page` (a file for an HTML
    page).

    >>> [rank["peak_allocated_bytes"] for rank in ranks("sharded")["ranks"]]
    [77744640, 77744640, 78071808, 77744640]
    """
    if engine is None:
        if isinstance(trace, list):
            raise ValueError('a list of traces needs an engine: ranks([...], engine="local")')
        return _answer("ranks", [trace], options)
    from . import _job_ranks

    return _job_ranks.ranks(trace, engine=engine, **options)


def timeline(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the memory over time: intervals with their lowest and highest value, phases, steps and the
    peak.

    `options` are the options of `memtrace timeline`, with `_` for `-`."""
    return _answer("timeline", [trace], options)


def check(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the problems of the trace, which are found by comparing each row with a replay. `status`
    is 1 if there is a problem.

    `options` are the options of `memtrace check`, with `_` for `-`.

    >>> check("gpt").status
    0
    """
    return _answer("check", [trace], options)


def diff(before: Trace, after: Trace, **options: Any) -> Answer:
    """Returns the peaks of two runs, compared by owner. `status` is 3 when `fail_over` is exceeded.

    `options` are the options of `memtrace diff`, with `_` for `-`.

    >>> diff("gpt", "gpt", fail_over="2%")["broken"]
    False"""
    return _answer("diff", [before, after], options)


def advise(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the changes that lower the peak most. `status` is 3 if no tried change reaches the size `fit`.

    With a change (`checkpoint`, `optimizer`, `dtype`, `batch`, ...), predicts the peak of the run with this
    change.
    `options` are the options of `memtrace advise`, with `_` for `-`.

    >>> change = advise("gpt", optimizer="sgd")["devices"][0]
    >>> change["before"]["bytes"], change["after"]["bytes"]
    (124781568, 107684864)
    """
    return _answer("advise", [trace], options)


def budget(trace: Trace = DEFAULT, **options: Any) -> Answer:
    """Returns the limits of the file `limits`, each with its highest value. `status` is 3 when one is
    exceeded.

    `options` are the options of `memtrace budget`, with `_` for `-`.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as limits:
    ...     _ = limits.write('total = { allocated = "100m" }')
    ...     limits.flush()
    ...     budget("gpt", limits=limits.name).status
    3
    """
    return _answer("budget", [trace], options)
