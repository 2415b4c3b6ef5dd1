"""Records the end of the script, after its last line and its exit functions, and before
Python frees its objects.

Exit functions run in the reverse order of their registration, so functions that the program registered before
the tracer run after the tracer's exit function. After all of them, Python collects garbage, and then frees
the globals of modules. So the tracer records the end when that collection begins, or in its exit function if
the program has disabled the collector.
"""

from __future__ import annotations

import atexit
import errno
import gc
import sys

from .failures import count, text_of
from .held import mark_share
from .native import hide, record_script_end

_is_marked = False


def _collection_begins(_phase: str) -> None:
    global _is_marked
    if not _is_marked and sys.is_finalizing():
        _is_marked = True
        record_script_end(_refused_memory())


def _at_exit() -> None:
    try:
        mark_share(has_ended=True)
    except Exception as error:
        # A class may override `__dict__`.
        count("search of an engine", error)
    if gc.isenabled():
        gc.callbacks.append(hide(_collection_begins))
    else:
        record_script_end(_refused_memory())


def _refused_memory() -> str:
    """Returns the class of the exception that ended the script if it says that the system refused
    memory, or else an empty text.

    Python keeps the last uncaught exception in `sys.last_value`.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return ""
    refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    # PyTorch's allocator of CPU tensors raises a RuntimeError with this text.
    refused = refused or "DefaultCPUAllocator: " in text_of(error)
    return type(error).__name__ if refused else ""


def watch_script_end() -> None:
    """Registers the exit function that leads to the record of the script's end."""
    atexit.register(hide(_at_exit))
