"""Keeps the code of the program's main module, whose lines show where its global names are set. The code
keeps no value of the program alive."""

from __future__ import annotations

import sys

# Empty if the code is unknown.
_code: list = []


def remember_main() -> None:
    """Keeps the code of `__main__` if it is running on the main thread."""
    global _code
    frame = sys._current_frames().get(sys.modules["threading"].main_thread().ident)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            _code = [frame.f_code]
        frame = frame.f_back


def main_code() -> list:
    """Returns the code of `__main__` in a list, which is empty if the code is unknown."""
    return list(_code)
