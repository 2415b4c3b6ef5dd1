"""Reads the variables of running functions, and finds the lines of code that set a name.

The values are read in place (../frame_values.rs), because `f_locals` would make the frame keep them. No table
of this module refers to a value; the tables have the `id` of each value instead.
"""

from __future__ import annotations

import collections
import sys
import time
import types
from typing import NamedTuple

from .native import frame_values, learn_frame_values

OWN_FILES = "<memtrace "
# The maximum number of frames read per thread, starting at the innermost.
MAX_FRAMES = 500
# The number of instructions between two checks of the clock.
STRIDE = 512
CELLS_WITH_LOCALS = sys.version_info >= (3, 11)
traceback_of = BaseException.__dict__["__traceback__"].__get__
# True once the place of a frame's values is known.
_is_learned = False


class Variable(NamedTuple):
    """A variable of a function's frame."""

    name: str
    code: types.CodeType
    line: int


def is_layout_known() -> bool:
    """Returns whether it is known where frames of this interpreter keep their values. Learns this first."""
    global _is_learned

    def learn(first, second, third):
        return learn_frame_values(sys._getframe(), first, second, third)

    _is_learned = _is_learned or bool(learn(object(), object(), object()))
    return _is_learned


def names_of(code) -> list[str]:
    """Returns the names of a frame's values, in the order of the values."""
    cells = code.co_cellvars
    if CELLS_WITH_LOCALS:
        own = set(code.co_varnames)
        cells = tuple(name for name in cells if name not in own)
    return [*code.co_varnames, *cells, *code.co_freevars]


def variables_of(frame) -> list[tuple[int, Variable]]:
    """Returns a pair for each variable of a frame that is set and not None: the `id` of its value, and the
    variable."""
    code = frame.f_code
    names = names_of(code)
    ids = [id(value) for value in frame_values(frame, len(names))]
    none, line = id(None), frame.f_lineno or code.co_firstlineno
    return [(value, Variable(name, code, line)) for value, name in zip(ids, names) if value != none]


def left_frames() -> list[types.FrameType]:
    """Returns the frames that the newest exception has unwound, innermost first. After an OOM, these are the
    frames of the failed request."""
    error = sys.exc_info()[1]
    if error is None:
        error = getattr(sys, "last_value", None)
    trace = traceback_of(error) if error is not None else None
    # A traceback begins at the outermost frame.
    innermost: collections.deque[types.FrameType] = collections.deque(maxlen=MAX_FRAMES)
    while trace is not None:
        innermost.appendleft(trace.tb_frame)
        trace = trace.tb_next
    return list(innermost)


def running_variables(
    left: list[types.FrameType],
) -> tuple[dict[int, Variable], dict[int, list[types.CodeType]]]:
    """Returns two tables: the variables of all functions that run now and of the frames in `left`, by the
    `id` of the value; and the code of the modules that run now, by the `id` of the namespace."""
    found: dict[int, Variable] = {}
    modules: dict[int, list[types.CodeType]] = {}
    for frame in left:
        if not frame.f_code.co_filename.startswith(OWN_FILES) and frame.f_code.co_name != "<module>":
            for value, variable in variables_of(frame):
                found.setdefault(value, variable)
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
LOCAL_SETS = ("STORE_FAST", "STORE_DEREF")
# The beginnings of the names of instructions that load a variable. Others load an attribute or a constant.
LOADS_VARIABLE = (
    "LOAD_FAST",
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_FROM_DICT_OR",
)
# From Python 3.13 on, one instruction may set two variables, or set one and then load one.
PAIRS = {
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
}
# Methods that put something into a container.
FILLING = frozenset(
    (
        "append",
        "appendleft",
        "add",
        "extend",
        "extendleft",
        "insert",
        "setdefault",
        "update",
        "put",
        "put_nowait",
        "push",
    )
)
# The kind of a line that puts something into the object that a name refers to.
FILLS = "FILLS"
# The maximum number of functions that are read for one name, including nested ones.
MAX_CODES = 200


class Lines:
    """Finds the source lines that assign to a name or add to its object. Each function is disassembled once.
    Reading stops at `deadline`, a `time.monotonic` value: lines that were not read by then are unknown."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        # By id(code): the code, so that its id stays valid, and the lines that set each name, by kind.
        self._lines: dict[int, tuple[types.CodeType, dict[tuple[str, str], list[int]]]] = {}

    def setting(self, code, name: str, kinds: tuple[str, ...]) -> int:
        """Returns the first line of a function or module that sets a name with one of these instructions.
        Returns 0 if no line does, or if the program has not loaded the module `dis`."""
        return min(self._all(code, name, kinds), default=0)

    def _all(self, code, name: str, kinds: tuple[str, ...]) -> list[int]:
        dis = sys.modules.get("dis")
        known = self._lines.get(id(code))
        if known is None:
            names = (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
            is_used = any(name in some for some in names)
            if dis is None or not is_used or time.monotonic() > self._deadline:
                return []
            known = self._lines[id(code)] = (code, self._read(dis, code))
        return [line for kind in kinds for line in known[1].get((kind, name), ())]

    def filling(self, codes, name: str) -> tuple[str, list[int]]:
        """Returns the file and the lines, in these functions and in nested ones, that put something into the
        object that `name` refers to: `name.append(x)`, `name[key] = x`, `name = name + x`. All lines are in
        the file of the first one. The list is empty if no line does this."""
        codes = list(codes)
        file, lines = "", set()
        for code in codes:
            found = self._all(code, name, (FILLS,))
            if found and code.co_filename == (file or code.co_filename):
                file = code.co_filename
                lines.update(found)
            if len(codes) < MAX_CODES:
                inners = [inner for inner in code.co_consts if type(inner) is types.CodeType]
                # A nested function that has a variable of its own with this name is left out.
                codes += [each for each in inners if name not in each.co_varnames + each.co_cellvars]
        return file, sorted(lines)

    def _read(self, dis, code) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        line = code.co_firstlineno
        # The names that the current line has loaded so far, in order: all of them, and those of variables.
        loaded: list[str] = []
        variables: list[str] = []
        for number, instruction in enumerate(dis.get_instructions(code)):
            if number % STRIDE == 0 and time.monotonic() > self._deadline:
                break
            starts = instruction.starts_line
            if starts is not None and starts is not False:
                line = getattr(instruction, "line_number", None) or starts
                loaded, variables = [], []
            whole, values = instruction.opname, instruction.argval
            for name, value in zip(PAIRS[whole], values) if whole in PAIRS else ((whole, values),):
                if name in SETS or name in LOCAL_SETS:
                    found.setdefault((name, value), []).append(line)
                    if value in variables and name != "STORE_ATTR":
                        found.setdefault((FILLS, value), []).append(line)
                elif name == "STORE_SUBSCR" and len(loaded) > 1:
                    found.setdefault((FILLS, loaded[-2]), []).append(line)
                elif name.startswith("LOAD_"):
                    if value in FILLING and loaded and name in ("LOAD_ATTR", "LOAD_METHOD"):
                        found.setdefault((FILLS, loaded[-1]), []).append(line)
                    # Some instructions load two names.
                    names = [str(each) for each in (value if type(value) is tuple else (value,))]
                    loaded += names
                    if name.startswith(LOADS_VARIABLE):
                        variables += names
        return found


def place(file: str, line: int) -> str:
    """Returns a file name and a line such as `train.py:41`; without the line if it is 0."""
    short = file.rpartition("/")[2]
    return f"{short}:{line}" if line else short
