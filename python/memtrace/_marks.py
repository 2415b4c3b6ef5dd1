"""Lets a script set marks, ranges and steps in its own trace.

    for n, batch in enumerate(loader):
        memtrace.step(n)
        with memtrace.phase("forward"):
            loss = model(batch)

A trace needs no marks. Every function here does nothing if the script does not run under memtrace, so the
calls may stay in the code. include/memtrace.h has the same functions for C and C++.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

__all__ = [
    "detail",
    "flush",
    "is_paused",
    "is_traced",
    "mark",
    "module",
    "op",
    "pause",
    "paused",
    "phase",
    "range",
    "resume",
    "retained",
    "step",
    "track_external",
]


def _returning(result: int) -> Callable[..., int]:
    """Returns a function that takes any arguments, does nothing, and returns `result`."""
    return lambda *_: result


def _find_library() -> ctypes.CDLL | None:
    """Returns the preloaded library with the types of its functions, or None if it is not loaded.

    A library that is older than this package may lack functions. Their calls do nothing, and a warning says
    so."""
    try:
        library = ctypes.CDLL(None)
        _ = library.memtrace_is_traced
    except (AttributeError, OSError):
        return None
    missing = []
    for name, result, arguments in [
        ("is_traced", ctypes.c_int, []),
        ("pause", None, []),
        ("resume", None, []),
        ("is_paused", ctypes.c_int, []),
        ("mark", None, [ctypes.c_char_p]),
        ("range_push", ctypes.c_int, [ctypes.c_char_p]),
        ("range_pop", ctypes.c_int, []),
        ("step", None, [ctypes.c_int64]),
        ("detail", None, [ctypes.c_int]),
        ("flush", ctypes.c_int, []),
    ]:
        function = getattr(library, "memtrace_" + name, None)
        if function is None:
            missing.append("memtrace_" + name)
            # A flush that did not happen fails.
            setattr(library, "memtrace_" + name, _returning(int(name == "flush")))
            continue
        function.restype, function.argtypes = result, arguments
    if missing:
        warnings.warn(
            f"memtrace: the preloaded library is older than this package and lacks {', '.join(missing)}; "
            "these calls do nothing",
            RuntimeWarning,
            stacklevel=2,
        )
    return library


_LIBRARY = _find_library()


def _find_tracker():
    """Returns the library function for `track_external`, or None if the library has no such
    function. It must be called with the GIL."""
    try:
        function = ctypes.PyDLL(None).memtrace_python_track
    except (AttributeError, OSError):
        return None
    function.restype, function.argtypes = None, [ctypes.py_object]
    return function


def _encoded(name: object) -> bytes:
    """Encodes a name as a C string, with NUL characters replaced."""
    return str(name).encode("utf-8", "replace").replace(b"\0", b" ")


def is_traced() -> bool:
    """Returns whether this process is traced."""
    return _LIBRARY is not None and bool(_LIBRARY.memtrace_is_traced())


@contextlib.contextmanager
def range(name: str) -> Iterator[None]:
    """Opens a range on this thread, for a `with` statement or as a decorator. The range owns the memory
    that is allocated inside.

    The name has the meaning of an NVTX range's name: a phase word sets the phase, any other name adds a level
    to the module path.

    >>> with range("tokenizer"):
    ...     pass
    >>> @range("collate")
    ... def collate(batch):
    ...     return sorted(batch)
    >>> collate([2, 1])
    [1, 2]
    """
    if _LIBRARY is not None:
        _LIBRARY.memtrace_range_push(_encoded(name))
    try:
        yield
    finally:
        if _LIBRARY is not None:
            _LIBRARY.memtrace_range_pop()


def phase(name: str) -> AbstractContextManager[None]:
    """Opens a range that sets the phase of the process to any name: `forward`, `eval`, `warm-up`.

    >>> with phase("warm-up"):
    ...     pass
    """
    return range(f"phase:{name}")


def module(path: str) -> AbstractContextManager[None]:
    """Opens a range whose memory belongs to the module `path`, whichever module runs."""
    return range(f"module:{path}")


def op(name: str) -> AbstractContextManager[None]:
    """Opens a range whose memory belongs to the op `name`, whichever op runs."""
    return range(f"op:{name}")


def step(number: int) -> None:
    """Begins the training step `number`. After the first call memtrace no longer counts steps by itself.

    Raises ValueError or TypeError if `number` is not a number, whether the script is traced or not.

    >>> for number, batch in enumerate(["a", "b"]):
    ...     step(number)
    """
    number = int(number)
    if _LIBRARY is not None:
        _LIBRARY.memtrace_step(number)


def detail(steps: int = 1) -> None:
    """Records the next `steps` steps in full, even if MEMTRACE_DETAIL would leave them out. If several
    requests overlap, the largest counts.

    Raises ValueError for less than one step, whether the script is traced or not."""
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps}")
    if _LIBRARY is not None:
        _LIBRARY.memtrace_detail(min(int(steps), 2**31 - 1))


def mark(text: str) -> None:
    """Adds a mark to the trace."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_mark(_encoded(text))


def pause() -> None:
    """Stops writing rows of ops and ranges. Memory is still recorded, with its owner."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_pause()


def resume() -> None:
    """Writes rows of ops and ranges again."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_resume()


def is_paused() -> bool:
    """Returns whether rows of ops and ranges are paused."""
    return _LIBRARY is not None and bool(_LIBRARY.memtrace_is_paused())


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses rows of ops and ranges for a `with` statement, and restores the state before it."""
    before = is_paused()
    pause()
    try:
        yield
    finally:
        if not before:
            resume()


def track_external(*external: object) -> None:
    """Registers tensors, modules and optimizers, also inside tuples, lists and dicts, before anything uses
    them.

    The memory of a tensor that requires a gradient gets the category `parameter`, the memory of any other
    tensor `buffer`. The parameters, buffers and gradients of a module and the state of an optimizer get
    their own categories. `MemTracker.track_external` in torch takes the same objects.

    Raises TypeError for any other object, whether the script is traced or not.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> track_external(model, {"optimizer": torch.optim.AdamW(model.parameters())})
    """
    # Imported here, because the rest of this file needs no torch.
    import torch
    from torch.utils._pytree import tree_flatten

    leaves = [leaf for leaf in tree_flatten(external)[0] if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
            raise TypeError(
                f"Object of type {type(leaf)} is not supported for tracking. "
                "Only stateful objects like modules, optimizers, and tensors are supported."
            )
    tracker = _find_tracker() if is_traced() else None
    if tracker is not None:
        tracker((tuple(leaves),))


def retained(*, everything: bool = False) -> list[dict]:
    """Searches for the holders of GPU memory from earlier steps: lists of losses or outputs, the closures of
    hooks, caches, graphs of autograd, and tracebacks of exceptions.

    Each holder is a dict: `holder` names it in a line, `bytes` is the size of the blocks that it keeps, and
    `verdict` is `grows` (blocks from more and more steps), `traceback` or `unused` (parameters that only an
    optimizer has). `is_retained` is True for these verdicts. With `everything`, also returns holders with
    the verdict `window` (only blocks of the last steps), `old` (only blocks of early steps) or `recent`. The
    trace has holders of every verdict.

    Returns an empty list if the script is not traced, has not used the GPU yet, MEMTRACE_RETAINED is off, or
    another thread's search is running."""
    if not is_traced():
        return []
    try:
        function = ctypes.PyDLL(None).memtrace_python_retained
    except (AttributeError, OSError):
        return []
    function.restype, function.argtypes = ctypes.py_object, []
    found = function() or []
    # A library that is older than this package gives no `is_retained`.
    retained = ("grows", "traceback", "unused")
    return [
        holder for holder in found if everything or holder.get("is_retained", holder["verdict"] in retained)
    ]


def flush() -> bool:
    """Waits until everything recorded so far is in the file.

    Returns False if some of it is missing in the file: the trace ended early (a full disk), writing took more
    than 10 seconds, or a thread has been inside one cudaFree for a second."""
    return _LIBRARY is None or _LIBRARY.memtrace_flush() == 0
