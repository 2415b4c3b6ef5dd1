"""Reads and writes the table of docs/contributors/programs.md, for scripts/programs."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/contributors/programs.md"
HEAD = [
    *("program", "version", "torch", "build", "runs", "same output", "peak of torch, bytes"),
    *("equal in the trace", "no category", "outside modules", "seconds, untraced / traced"),
]
START, END = "<!-- programs -->", "<!-- /programs -->"


def kept() -> dict[str, list[str]]:
    """Returns the rows of the page, by program."""
    rows = PAGE.read_text().split(START)[1].split(END)[0].strip().splitlines()[2:]
    cells = [row[2:-2].split(" | ") for row in rows]
    return {row[0]: row for row in cells if len(row) == len(HEAD)}


def table(rows: list[list[str]]) -> str:
    """Returns the table in Markdown."""
    sides = [":---", *["---"] * 5, "---:", "---", *["---:"] * 3]
    return "\n".join("| " + " | ".join(line) + " |" for line in [HEAD, sides, *rows])


def write(rows: dict[str, list[str]], order: list[str]) -> None:
    """Writes rows into the page in this order, and keeps the rows of other programs."""
    rows = {**kept(), **rows}
    before, rest = PAGE.read_text().split(START)
    listed = [rows[name] for name in order if name in rows]
    PAGE.write_text(f"{before}{START}\n{table(listed)}\n{END}{rest.split(END)[1]}")
