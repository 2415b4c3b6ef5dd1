"""Shows the library frames that are known, so that it learns where this interpreter keeps its frames.

../../attribution/python_frames.rs reads them later without the GIL: of each allocation with
`MEMTRACE_STACKS=python`, otherwise of those without an op.
"""

from __future__ import annotations

import sys

from .native import learn_frame_layout

# A newer version may have the same layout: the library checks what it has learned.
IS_SUPPORTED = sys.implementation.name == "cpython" and sys.version_info >= (3, 9)


def show_frames() -> None:
    """Calls the library from three nested functions, each at a different place in its code."""

    def inner():
        if not IS_SUPPORTED:
            return learn_frame_layout()
        frame = sys._getframe()
        code, callers = frame.f_code, []
        for _ in range(3):
            frame = frame.f_back
            callers += (id(frame.f_code), frame.f_lasti, frame.f_lineno)
        first = sys._getframe(1).f_code
        # The code object holds this attribute's object; the other attribute is created on access.
        lines = first.co_linetable if sys.version_info >= (3, 10) else first.co_lnotab
        learn_frame_layout(
            id(code), type(code).__basicsize__, id(first.co_filename), id(first.co_name), id(lines), *callers
        )

    def middle():
        # Some code before the call, so that it is not at the place where `outer` makes its call.
        results = [IS_SUPPORTED, IS_SUPPORTED]
        results.append(inner())

    def outer():
        middle()

    outer()
