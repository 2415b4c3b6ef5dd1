"""Reads and writes the table of docs/contributors/programs.md, for scripts/programs."""

from __future__ import annotations

from .built import ROOT
from .page_block import PageBlock

HEAD = [
    *("program", "version", "torch", "build", "runs", "same output", "peak of torch, bytes"),
    *("equal in the trace", "no category", "outside modules", "seconds, untraced / traced"),
]
BLOCK = PageBlock.named(ROOT / "docs/contributors/programs.md", "programs")


def kept() -> dict[str, list[str]]:
    """Returns the rows of the page, by program."""
    rows = BLOCK.text().strip().splitlines()[2:]
    cells = [row[2:-2].split(" | ") for row in rows]
    return {row[0]: row for row in cells if len(row) == len(HEAD)}


def table(rows: list[list[str]]) -> str:
    """Returns the table in Markdown."""
    sides = [":---", *["---"] * 5, "---:", "---", *["---:"] * 3]
    return "\n".join("| " + " | ".join(line) + " |" for line in [HEAD, sides, *rows])


def write(rows: dict[str, list[str]], order: list[str]) -> None:
    """Writes rows into the page in this order, and keeps the rows of other programs."""
    rows = {**kept(), **rows}
    listed = [rows[name] for name in order if name in rows]
    BLOCK.write(f"\n{table(listed)}\n")
