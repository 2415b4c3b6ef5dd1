"""Reads and writes `docs/accuracy.csv`, which has each published figure and our last number for it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from .published_figures import Figure, FigureError, read_table

KEY = ["source", "card", "torch", "case", "arguments", "label", "what"]
COLUMNS = [*KEY, "published", "unit", "ours", "second_torch", "error_percent", "computed"]


@dataclass(frozen=True)
class Row:
    """A published figure and our number. Both numbers are texts, in the unit of the source."""

    figure: Figure
    ours: str
    # Our number on the second torch; empty if it equals `ours` or was not computed.
    second_torch: str
    error_percent: str
    # When the number was computed, and with which build.
    computed: str

    def equal(self) -> bool:
        return self.ours == self.figure.published

    def error(self) -> float:
        return float(self.error_percent) / 100

    def record(self) -> list[str]:
        figure = self.figure
        beside = [
            figure.published,
            figure.unit,
            self.ours,
            self.second_torch,
            self.error_percent,
            self.computed,
        ]
        return [*key(figure), *beside]


def key(figure: Figure) -> tuple[str, ...]:
    run = figure.run
    where = (figure.source.source, run.card, figure.torch, run.case, run.arguments)
    return (*where, figure.label, figure.what)


def read_rows(path: Path, figures: list[Figure]) -> dict[Figure, Row]:
    """Returns the rows of the figures whose published number and unit are still the ones in the file."""
    rows = {tuple(row[name] for name in KEY): row for _, row in read_table(path, COLUMNS)}
    found = {}
    for figure in figures:
        row = rows.get(key(figure))
        if row is not None and (row["published"], row["unit"]) == (figure.published, figure.unit):
            found[figure] = Row(
                figure, row["ours"], row["second_torch"], row["error_percent"], row["computed"]
            )
    return found


def in_order(rows: dict[Figure, Row], figures: list[Figure]) -> list[Row]:
    """Returns a row for each figure. Raises FigureError for the first figure without a row."""
    for figure in figures:
        if figure not in rows:
            missing = " ".join(filter(None, key(figure)))
            raise FigureError(f"accuracy.csv has no row of {missing}: add --source {figure.source.source}")
    return [rows[figure] for figure in figures]


def write_rows(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row.record() for row in rows)
