"""Passes known frames to the library, so that it learns where this interpreter keeps its frames.

Later, ../../attribution/python_frames.rs reads frames without the GIL: for each allocation with
`MEMTRACE_STACKS=python`, and otherwise for the few that reach the GPU without an op.
"""

from __future__ import annotations

import sys

from .native import learn_frame_layout

# Newer versions are not excluded, because the library checks the layout that it has learned.
IS_SUPPORTED = sys.implementation.name == "cpython" and sys.version_info >= (3, 9)


def show_frames() -> None:
    """Calls the library from three nested functions, each of which makes its call at
    another offset in its code."""

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
        # This code makes the offset of the call differ from the offset of the call in `outer`.
        results = [IS_SUPPORTED, IS_SUPPORTED]
        results.append(inner())

    def outer():
        middle()

    outer()
