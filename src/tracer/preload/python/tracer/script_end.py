"""Marks the end of the script: after its last line and its functions at exit, before Python frees its
objects.

The functions at exit run in the reverse order of their registration, so those that the program registered
before the tracer run after the tracer's. After all of them Python collects garbage, and then frees the
globals of modules.
"""

from __future__ import annotations

import atexit
import gc
import sys

from .failures import count
from .held import mark_share
from .native import hide, record_script_end

_is_marked = False


def _collection_begins(_phase: str) -> None:
    global _is_marked
    if not _is_marked and sys.is_finalizing():
        _is_marked = True
        record_script_end()


def _at_exit() -> None:
    try:
        mark_share(has_ended=True)
    except Exception as error:
        # A class that overrides `__dict__`.
        count("search of an engine", error)
    if gc.isenabled():
        gc.callbacks.append(hide(_collection_begins))
    else:
        record_script_end()


def watch_script_end() -> None:
    """Records the end of the script when it comes."""
    atexit.register(hide(_at_exit))
