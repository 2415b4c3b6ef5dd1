"""Implements `%memtrace` and `%%memtrace` in IPython and Jupyter.

    %memtrace peak --by module      a report on the trace of this kernel; %memtrace alone is the summary
    %memtrace report                the page, inline
    %%memtrace                      on a cell: what it added, and which modules hold it

The kernel that `python -m memtrace.kernel install` adds loads them. In other kernels, run: %load_ext memtrace
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from . import _blocks, _command, _marks, _page, _sizes

# The endings of PyTorch's snapshots.
_SNAPSHOTS = (".pickle", ".pkl")
UNTRACED = "this kernel is not traced; python -m memtrace.kernel install adds one that is"


class Text:
    """A text that a notebook shows in a monospaced font, and a terminal unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text.rstrip("\n")

    def __repr__(self) -> str:
        return self.text


def register(ipython: Any) -> None:
    """Adds both magics to a shell."""
    ipython.register_magic_function(lambda line: line_magic(line), "line", "memtrace")
    ipython.register_magic_function(lambda line, cell: cell_magic(ipython, line, cell), "cell", "memtrace")


def line_magic(line: str) -> Any:
    """Returns a report on the trace of this kernel, or on the trace that the line names."""
    try:
        words = shlex.split(line) or ["summary"]
    except ValueError as error:
        print(f"memtrace: the line cannot be split into words: {error}")
        return None
    try:
        if words[0] != "help" and not any(map(_names_trace, words, words[1:])):
            words.append(own_trace())
        if words[0] == "report" and not any(word.startswith(("-o", "--output")) for word in words):
            return _page.page(words[1:])
        return Text(_command.run(words).stdout)
    except (_command.TraceError, _blocks.NotMeasured) as error:
        print(f"memtrace: {error}")
        return None


def _names_trace(before: str, word: str) -> bool:
    """Returns true if a word names a trace, and not the value of the option before it."""
    if not os.path.exists(word):
        return False
    if not before.startswith("-"):
        return True
    files = map(str, Path(word).glob("*")) if os.path.isdir(word) else [word]
    return any(_command.is_trace(file) or file.endswith(_SNAPSHOTS) for file in files)


def cell_magic(ipython: Any, line: str, cell: str) -> Any:
    """Runs a cell, and reports the memory that it added."""
    if line.strip():
        print(
            f"memtrace: %%memtrace takes no arguments, but {line.strip()!r} was given; the cell did not run"
        )
        return None
    start = _position()
    # An error of the cell is shown as in any other cell, and its memory is still measured.
    ipython.run_cell(cell, store_history=False)
    if start is None:
        return None
    try:
        use = _blocks.use_between(start, _blocks.here(), [])
    except _blocks.NotMeasured as error:
        print(f"memtrace: {error}")
        return None
    print(added(use))
    return None


def _position() -> _blocks.Position | None:
    """Returns the position in the trace. Prints a message and returns None if the
    memory cannot be measured."""
    try:
        if not _marks.is_traced():
            raise _blocks.NotMeasured(UNTRACED)
        return _blocks.here()
    except _blocks.NotMeasured as error:
        print(f"memtrace: {error}")
        return None


def own_trace() -> str:
    """Returns the path of this kernel's trace, after all rows so far were written.

    Raises NotMeasured if this kernel is not traced or has not used the GPU yet."""
    if not _marks.is_traced():
        raise _blocks.NotMeasured(UNTRACED)
    path = _blocks.here().path
    if path is None:
        raise _blocks.NotMeasured("this kernel has not used the GPU yet")
    return str(path)


def added(use: _blocks.Use) -> str:
    """Describes the memory that a cell added, on each GPU, and its owners."""
    devices = sorted(use.peaks)
    has_several = len(devices) > 1
    lines = [
        f"The cell added {_sizes.show(use.left_on.get(device, 0))} that is still in use"
        f"{f' on GPU {device}' if has_several else ''}; at its peak it held "
        f"{_sizes.show(use.peaks.get(device, 0))}{' there' if has_several else ''}."
        for device in devices or [0]
    ]
    if use.left:
        lines += ["", *_blocks.table(use.left, use.left_bytes)]
    elif use.at_peak:
        where = f" on GPU {use.device}" if has_several else ""
        lines += [f"At the peak{where}:", "", *_blocks.table(use.at_peak, use.peak)]
    return "\n".join(lines)
