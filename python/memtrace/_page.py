"""Creates the HTML page of a run, for a notebook or as a file."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from . import _command
from ._read import DEFAULT, Trace


class Page:
    """The HTML page of a run. A notebook shows it; `save` writes it to a file."""

    def __init__(self, text: str, height: int) -> None:
        self.html = text
        self._height = height

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to a file, and returns its path."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        # A separate frame isolates the page's styles and scripts from the notebook's.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="memtrace" '
            f'style="width: 100%; height: {self._height}px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<memtrace.Page of {len(self.html):,} bytes; save(path) writes it>"


def report(
    trace: Trace = DEFAULT, *, against: Trace | None = None, height: int = 720, **options: Any
) -> Page:
    """Returns the page of a run, or of two runs compared. A notebook displays it.

    `options` are the options of `memtrace report`: `rank`, `device`, `window`, `step`, `units`, `lenient`.

    Raises TraceError when a trace cannot be read.

    >>> page = report("gpt")
    >>> page.html.startswith("<!doctype html>")
    True
    """
    arguments = _command.options({"against": against, **options})
    return page([*arguments, "--", os.fspath(trace)], height)


def page(arguments: list[str], height: int = 720) -> Page:
    """Returns the page of `memtrace report` with these arguments."""
    return Page(_command.run(["report", "--output=-", *arguments]).stdout, height)
