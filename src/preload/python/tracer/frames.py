"""The variables of running functions, and the lines of code that set a name.

The values are read in place (src/preload/python/frame_values.rs): `f_locals` would make the frame keep them.
Nothing here refers to a value: tables have the `id` of each.
"""

from __future__ import annotations

import sys
import types
from typing import NamedTuple

from .native import frame_values, learn_frame_values

OWN_FILES = "<memtrace "
# The frames of one thread that are looked at, from the innermost outwards.
MAX_FRAMES = 500
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


def setting_line(code, name: str, kinds: tuple[str, ...]) -> int:
    """The first line of a function or module that sets a name with one of these instructions; 0 when no line
    does, or when the program has not loaded the module `dis`."""
    dis = sys.modules.get("dis")
    if dis is None or name not in code.co_names and name not in names_of(code):
        return 0
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        starts = instruction.starts_line
        if starts is not None and starts is not False:
            line = getattr(instruction, "line_number", None) or starts
        if instruction.argval == name and instruction.opname in kinds:
            return line
    return 0


def place(file: str, line: int) -> str:
    """`train.py:41`, from a path and a line."""
    short = file.rpartition("/")[2]
    return f"{short}:{line}" if line else short
