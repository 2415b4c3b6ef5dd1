"""Finds and runs the command `memtrace` that belongs to this package."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

NAME = "memtrace"
_LIBRARIES = ("libmemtrace.so", "libmemtrace_phantom.so")


class TraceError(Exception):
    """Raised if a trace cannot be read, or a request is invalid. The text is the command's own message."""


@functools.cache
def find() -> str:
    """Returns the path of the command.

    Raises TraceError if it is not found."""
    for folder in _folders():
        if os.access(folder / NAME, os.X_OK):
            return str(folder / NAME)
    found = shutil.which(NAME)
    if found is None:
        raise TraceError(
            f"the command {NAME} is missing: it is neither beside this Python nor on the PATH; "
            "install it with: pip install gpu-memtrace"
        )
    return found


def _folders() -> list[Path]:
    """Returns the folders that may have the command, the likeliest first."""
    package = Path(__file__).resolve().parent
    folders = []
    tree = package.parent.parent
    if (tree / "Cargo.toml").is_file():
        folders.append(tree / "target" / "release")
    folders.append(Path(sysconfig.get_path("scripts")))
    folders.append(Path(sysconfig.get_path("scripts", "posix_user")))
    # `pip install --target` puts commands there.
    folders.append(package.parent / "bin")
    return folders


def plain_name(name: str) -> str:
    """Returns the name of a trace without the ending of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def is_trace(name: str) -> bool:
    """Returns True if a file has the name of a trace, plain or compressed."""
    plain = plain_name(name)
    return plain.endswith(".csv") and not plain.endswith(".stacks.csv")


def untraced_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for a command that reads traces, without memtrace's preloaded libraries."""
    environment = dict(os.environ if environment is None else environment)
    preloaded = environment.pop("LD_PRELOAD", "").replace(":", " ").split()
    others = [path for path in preloaded if not path.endswith(_LIBRARIES)]
    if others:
        environment["LD_PRELOAD"] = ":".join(others)
    return environment


def run(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command with these arguments, by default in this environment without memtrace's libraries.

    Raises TraceError with the text of stderr if the request is invalid or the trace cannot be read."""
    result = subprocess.run(
        [find(), *arguments],
        env=untraced_environment(environment),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    # 1 and 3 are answers too: a problem was found, or a limit was exceeded.
    if result.returncode not in (0, 1, 3):
        why = " ".join(line.removeprefix("memtrace:").strip() for line in result.stderr.splitlines())
        raise TraceError(why or f"{' '.join(arguments)}: {NAME} ended with status {result.returncode}")
    return result


def options(given: dict[str, Any]) -> list[str]:
    """Returns the options of the command for keyword arguments, with `-` for `_`. The items of a list are
    separated by commas. An option that is None or False is left out."""
    words = []
    for name, value in given.items():
        option = "--" + name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            items = value if isinstance(value, (list, tuple)) else [value]
            texts = (str(os.fspath(item) if isinstance(item, os.PathLike) else item) for item in items)
            words.append(f"{option}={','.join(texts)}")
    return words


def answer(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Runs the command with --json. Returns the answer and the exit status."""
    result = run([arguments[0], "--json", *arguments[1:]])
    return json.loads(result.stdout), result.returncode
