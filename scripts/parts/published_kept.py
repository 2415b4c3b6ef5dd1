"""Rows of `docs/accuracy.md` from an earlier run, for a run of some sources alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .published_figures import NEWEST, Figure, FigureError

COMPUTED = "Ours: computed "
NEWEST_NOTE = f"torch {NEWEST}: "
NEWEST_LINE = f"equal when all run on torch {NEWEST}"


@dataclass
class Kept:
    """A published figure and our number as the page has it; as `Compared`, without the bytes."""

    figure: Figure
    text: str
    relative: float
    newest: str
    failure: str = ""
    ours: dict[str, int] = field(default_factory=dict)
    measured: int = 0

    def equal(self, torch: str = "") -> bool:
        return self.shown(torch) == self.figure.published

    def error(self) -> float:
        return self.relative

    def shown(self, torch: str = "") -> str:
        return self.newest if torch else self.text


@dataclass
class Page:
    """What the page says of each source: its rows by their first three cells, and when they were computed."""

    rows: dict[str, dict[tuple[str, str, str], list[str]]]
    computed: dict[str, str]
    newest_line: str

    def kept(self, figure: Figure, place: str) -> Kept:
        key = (figure.run.card, place, f"{figure.published} {figure.unit}")
        cells = self.rows.get(figure.source.title, {}).get(key)
        if cells is None:
            row = " | ".join(key)
            raise FigureError(f"the page has no row {row}: add --source {figure.source.source}")
        text, error, notes = cells
        note = notes.partition("; ")[0]
        newest = note.removeprefix(NEWEST_NOTE) if note.startswith(NEWEST_NOTE) else text
        kept = Kept(figure, text, 0.0 if error == "equal" else float(error.rstrip("%")) / 100, newest)
        if newest != text:
            kept.ours[NEWEST] = 0
        return kept


def read_page(path: Path) -> Page:
    page = Page({}, {}, "")
    title = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith(COMPUTED):
            page.computed[title] = line.removeprefix(COMPUTED).rstrip(".")
        elif line.startswith("| "):
            inside = re.split(r"(?<!\\)\|", line.strip()[1:-1])
            cells = [cell.replace("\\|", "|").strip() for cell in inside]
            if len(cells) == 6:
                page.rows.setdefault(title, {})[cells[0], cells[1], cells[2]] = cells[3:]
            elif cells[0] == NEWEST_LINE:
                page.newest_line = cells[1]
    return page
