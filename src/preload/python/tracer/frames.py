"""The variables of running functions, and the lines of code that set a name.

The values are read in place (src/preload/python/frame_values.rs): `f_locals` would make the frame keep them.
Nothing here refers to a value: tables have the `id` of each.
"""

from __future__ import annotations

import sys
import time
import types
from typing import NamedTuple

from .native import frame_values, learn_frame_values

OWN_FILES = "<memtrace "
# The frames of one thread that are looked at, from the innermost outwards.
MAX_FRAMES = 500
# Instructions between two looks at the clock.
STRIDE = 512
CELLS_WITH_LOCALS = sys.version_info >= (3, 11)


class Variable(NamedTuple):
    """A variable of a function's frame."""

    name: str
    code: types.CodeType
    line: int


def learn() -> bool:
    """Learns where frames of this interpreter keep their values."""

    def known(first, second, third):
        return learn_frame_values(sys._getframe(), first, second, third)

    return bool(known(object(), object(), object()))


def names_of(code) -> list[str]:
    """The names of a frame's values, in their order."""
    cells = code.co_cellvars
    if CELLS_WITH_LOCALS:
        own = set(code.co_varnames)
        cells = tuple(name for name in cells if name not in own)
    return [*code.co_varnames, *cells, *code.co_freevars]


def variables_of(frame) -> list[tuple[int, Variable]]:
    """The `id` of each value of a frame's variables, and the variable."""
    code = frame.f_code
    names = names_of(code)
    ids = [id(value) for value in frame_values(frame, len(names))]
    none, line = id(None), frame.f_lineno or code.co_firstlineno
    return [
        (value, Variable(name, code, line)) for value, name in zip(ids, names, strict=False) if value != none
    ]


def running_variables() -> tuple[dict[int, Variable], dict[int, list[types.CodeType]]]:
    """The variables of all functions that run now, by the `id` of their values, and the code of modules that
    run, by the `id` of their namespaces."""
    found: dict[int, Variable] = {}
    modules: dict[int, list[types.CodeType]] = {}
    for frame in sys._current_frames().values():
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if code.co_name == "<module>":
                modules.setdefault(id(frame.f_globals), []).append(code)
            elif not code.co_filename.startswith(OWN_FILES):
                for value, variable in variables_of(frame):
                    found.setdefault(value, variable)
            frame = frame.f_back
    return found, modules


SETS = ("STORE_NAME", "STORE_GLOBAL", "STORE_ATTR")


class Lines:
    """The lines that set names. Each function is read once, until the deadline in seconds of
    `time.monotonic`: lines after it are unknown."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        # By the `id` of the code: itself, which keeps the id, and the first line that sets a name, by kind.
        self._lines: dict[int, tuple[types.CodeType, dict[tuple[str, str], int]]] = {}

    def setting(self, code, name: str, kinds: tuple[str, ...]) -> int:
        """The first line of a function or module that sets a name with one of these instructions; 0 when no
        line does, or when the program has not loaded the module `dis`."""
        dis = sys.modules.get("dis")
        known = self._lines.get(id(code))
        if known is None:
            if dis is None or name not in code.co_names or time.monotonic() > self._deadline:
                return 0
            known = self._lines[id(code)] = (code, self._read(dis, code))
        lines = [line for kind in kinds if (line := known[1].get((kind, name)))]
        return min(lines, default=0)

    def _read(self, dis, code) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        line = code.co_firstlineno
        for number, instruction in enumerate(dis.get_instructions(code)):
            if number % STRIDE == 0 and time.monotonic() > self._deadline:
                break
            starts = instruction.starts_line
            if starts is not None and starts is not False:
                line = getattr(instruction, "line_number", None) or starts
            if instruction.opname in SETS:
                found.setdefault((instruction.opname, instruction.argval), line)
        return found


def place(file: str, line: int) -> str:
    """`train.py:41`, from a path and a line."""
    short = file.rpartition("/")[2]
    return f"{short}:{line}" if line else short
