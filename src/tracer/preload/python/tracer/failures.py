"""Counts the exceptions that the tracer catches, so that they do not reach the program.

The trace's end row has their number (`python_errors=N`), and `MEMTRACE_LOG=debug` prints the first of each
kind. The tracer catches `Exception` only, because a KeyboardInterrupt in a hook belongs to the program.
"""

from __future__ import annotations

from .native import count_failure, log_failure


def count(place: str, error: Exception) -> None:
    """Counts an exception that a hook caught. `place` names the hook in the log."""
    kind = type(error).__name__
    if count_failure(place, kind):
        log_failure(place, kind, f"{text_of(error)} ({line_of(error)})")


def text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as its_own:  # An exception of the program may fail to format itself.
        return f"(no text: {type(its_own).__name__})"


def line_of(error: Exception) -> str:
    """Returns the file and line that raised the exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "no line"
