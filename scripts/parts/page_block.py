"""The part of a page that a script writes, between two marks that no reader sees."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PageBlock:
    """The text between two marks of a page.

    Its methods end the script with a message unless the page has each mark once, in this order.
    """

    page: Path
    begin: str
    end: str

    @staticmethod
    def named(page: Path, name: str) -> PageBlock:
        """Returns the block between `<!-- NAME -->` and `<!-- /NAME -->`."""
        return PageBlock(page, f"<!-- {name} -->", f"<!-- /{name} -->")

    def text(self) -> str:
        """Returns the text between the marks."""
        return self._parts()[1]

    def page_with(self, text: str) -> str:
        """Returns the page with another text between the marks."""
        before, _, after = self._parts()
        return f"{before}{self.begin}{text}{self.end}{after}"

    def write(self, text: str) -> None:
        """Writes the page with another text between the marks."""
        self.page.write_text(self.page_with(text), encoding="utf-8")

    def _parts(self) -> tuple[str, str, str]:
        page = self.page.read_text(encoding="utf-8")
        counts = page.count(self.begin), page.count(self.end)
        if counts != (1, 1) or page.index(self.begin) > page.index(self.end):
            marks = f"{self.begin} and {self.end}"
            name = Path(sys.argv[0]).name
            sys.exit(f"{name}: {self.page} must have these two marks once, in this order: {marks}")
        before, rest = page.split(self.begin)
        text, after = rest.split(self.end)
        return before, text, after
