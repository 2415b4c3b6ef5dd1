"""What a script may tell memtrace of itself.

    import memtrace

    for n, batch in enumerate(loader):
        memtrace.step(n)
        with memtrace.phase("forward"):
            loss = model(batch)

Nothing here is needed for a trace, and nothing here does anything when the script does not run under
memtrace: it may stay in the code. The same functions are there for C in include/memtrace.h.
"""

import contextlib
import ctypes

__all__ = [
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
    "step",
    "track_external",
]


def _library():
    """The preloaded library's functions; None when there is none."""
    try:
        library = ctypes.CDLL(None)
        _ = library.memtrace_is_traced
    except (AttributeError, OSError):
        return None
    for name, result, arguments in [
        ("is_traced", ctypes.c_int, []),
        ("pause", None, []),
        ("resume", None, []),
        ("is_paused", ctypes.c_int, []),
        ("mark", None, [ctypes.c_char_p]),
        ("range_push", ctypes.c_int, [ctypes.c_char_p]),
        ("range_pop", ctypes.c_int, []),
        ("step", None, [ctypes.c_int64]),
        ("flush", ctypes.c_int, []),
    ]:
        function = getattr(library, "memtrace_" + name)
        function.restype, function.argtypes = result, arguments
    return library


_LIBRARY = _library()


def _tracker():
    """The library's function that needs the GIL; None when it is not there."""
    try:
        function = ctypes.PyDLL(None).memtrace_python_track
    except (AttributeError, OSError):
        return None
    function.restype, function.argtypes = None, [ctypes.py_object]
    return function


def _text(name):
    # A name ends where C sees its end.
    return str(name).encode("utf-8", "replace").replace(b"\0", b" ")


def is_traced():
    """Is this process traced?"""
    return _LIBRARY is not None and bool(_LIBRARY.memtrace_is_traced())


@contextlib.contextmanager
def range(name):
    """A range on this thread: what is allocated inside is owned by it. Its name means what an NVTX range's
    does: a phase word is a phase, anything else a level of the module path. Also a decorator."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_range_push(_text(name))
    try:
        yield
    finally:
        if _LIBRARY is not None:
            _LIBRARY.memtrace_range_pop()


def phase(name):
    """A phase of the process: `forward`, `eval`, whatever the script calls it."""
    return range(f"phase:{name}")


def module(path):
    """Memory allocated inside belongs to the module `path`, whatever module runs."""
    return range(f"module:{path}")


def op(name):
    """Memory allocated inside belongs to the op `name`, whatever op runs."""
    return range(f"op:{name}")


def step(number):
    """The training step `number` begins; memtrace stops counting steps by itself."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_step(int(number))


def mark(text):
    """A mark in the trace."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_mark(_text(text))


def pause():
    """Leaves out the rows of ops and ranges. Memory is recorded all the same, with its owner."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_pause()


def resume():
    """Ends what pause() began."""
    if _LIBRARY is not None:
        _LIBRARY.memtrace_resume()


def is_paused():
    """Are rows of ops and ranges left out?"""
    return _LIBRARY is not None and bool(_LIBRARY.memtrace_is_paused())


@contextlib.contextmanager
def paused():
    """pause(), and resume() at the end unless it was paused before."""
    before = is_paused()
    pause()
    try:
        yield
    finally:
        if not before:
            resume()


def track_external(*external):
    """Registers tensors, modules and optimizers, in whatever tuples, lists and dicts: a tensor's memory is of the
    category `other`, a module's parameters, buffers and gradients and an optimizer's state are what they are, also
    before anybody called them. The rules and the error are those of `MemTracker.track_external`.

    Raises TypeError for what is none of these, traced or not."""
    # Not at the top: who uses the rest of this file needs no torch.
    import torch
    from torch.utils._pytree import tree_flatten

    leaves = [leaf for leaf in tree_flatten(external)[0] if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
            raise TypeError(
                f"Object of type {type(leaf)} is not supported for tracking. "
                "Only stateful objects like modules, optimizers, and tensors are supported."
            )
    tracker = _tracker() if is_traced() else None
    if tracker is not None:
        tracker((tuple(leaves),))


def flush():
    """Waits until everything recorded so far is in the file; False when that took too long, or when a thread has
    been in the middle of one cudaFree for a second."""
    return _LIBRARY is None or _LIBRARY.memtrace_flush() == 0
