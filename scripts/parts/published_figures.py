"""Reads and checks the figures that others published: `figures.csv` and
`sources.csv` of `tests/published`."""

from __future__ import annotations

import csv
import struct
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from .built import ROOT

CASES = ROOT / "tests/published"
COLUMNS = ["source", "card", "torch", "libraries", "case", "arguments", "label", "what", "published", "unit"]
COLUMNS += ["cause"]
SOURCE_COLUMNS = ["source", "title", "address", "measured", "kind", "rounding", "note"]
# The torch of figures without a version, and of the second run of the others.
SECOND_TORCH = "2.11.0"
UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "tokens": 1,
    "": 1,
}


class FigureError(Exception):
    """Raised if a file or a request cannot be used. The text is one line for the user."""


@dataclass(frozen=True, order=True)
class Run:
    """One process, which runs a case with its arguments on a card and with given versions of libraries. It
    computes every figure of the case with these arguments."""

    # The value of `--phantom`. ` --ranks 0` may follow it.
    card: str
    torch: str
    libraries: str
    case: str
    arguments: str

    def __str__(self) -> str:
        beside = f" with {self.libraries}" if self.libraries else ""
        return (
            " ".join(f"{self.case} {self.arguments}".split()) + f" on {self.card}, torch {self.torch}{beside}"
        )


@dataclass(frozen=True)
class Source:
    """A source of figures: who measured them, and where they are published."""

    source: str
    title: str
    address: str
    measured: str
    # `training` for whole training runs; empty for single layers, forwards and operators.
    kind: str
    # How the number was rounded before it was printed: empty for decimal digits, `float32`, or `down` if
    # whole units were truncated.
    rounding: str
    note: str


@dataclass(frozen=True)
class Figure:
    """One published number."""

    source: Source
    run: Run
    # The version of torch that the source used; empty if unknown.
    torch: str
    label: str
    what: str
    published: str
    unit: str
    cause: str

    @property
    def number(self) -> Decimal:
        return Decimal(self.published)

    def in_unit(self, measured: int) -> Decimal:
        return Decimal(measured) / UNITS[self.unit]

    def error(self, measured: int) -> float:
        """Returns the relative difference of our number from the published one."""
        if self.number == 0:
            return 0.0 if measured == 0 else float("inf")
        return float(self.in_unit(measured) / self.number - 1)

    def equal(self, measured: int) -> bool:
        """Returns whether our number equals the published number when it is rounded in the same way."""
        ours = self.in_unit(measured)
        if self.source.rounding == "float32":
            ours = Decimal(struct.unpack("f", struct.pack("f", float(ours)))[0])
        if self.source.rounding == "down":
            return ours // 1 == self.number
        exponent = self.number.as_tuple().exponent
        half = Decimal(1).scaleb(exponent if isinstance(exponent, int) else 0) / 2
        return abs(ours - self.number) <= half


def read_table(path: Path, columns: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the rows of a CSV file with these columns, each after a text that names the file and the row.

    Raises FigureError if the file cannot be read or has other columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FigureError(f"cannot read {path}: {error}") from error
    if not rows:
        raise FigureError(f"{path} is empty; its first line is {','.join(columns)}")
    if rows[0] != columns:
        raise FigureError(f"{path}:1: the columns are {','.join(rows[0])}, and must be {','.join(columns)}")
    table = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(columns):
            raise FigureError(f"{path}: row {number} has {len(row)} fields, and must have {len(columns)}")
        table.append((f"{path}: row {number}", dict(zip(columns, row))))
    return table


def read_sources(folder: Path) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for place, row in read_table(folder / "sources.csv", SOURCE_COLUMNS):
        if row["source"] in sources:
            raise FigureError(f"{place}: a second source {row['source']}")
        if row["kind"] not in ("", "training"):
            raise FigureError(f"{place}: kind is {row['kind']!r}; expected training or no text")
        if row["rounding"] not in ("", "float32", "down"):
            raise FigureError(f"{place}: rounding is {row['rounding']!r}; there are float32, down and none")
        sources[row["source"]] = Source(**row)
    return sources


def read_figures(folder: Path = CASES) -> list[Figure]:
    """Returns all figures, in the order of the file."""
    sources = read_sources(folder)
    figures: list[Figure] = []
    seen: dict[tuple[Run, str, str, str], str] = {}
    for place, row in read_table(folder / "figures.csv", COLUMNS):
        if row["source"] not in sources:
            raise FigureError(f"{place}: no source {row['source']!r} in sources.csv")
        if row["unit"] not in UNITS:
            raise FigureError(f"{place}: no unit {row['unit']!r}; there are {', '.join(filter(None, UNITS))}")
        try:
            finite = Decimal(row["published"]).is_finite()
        except InvalidOperation:
            finite = False
        if not finite:
            raise FigureError(f"{place}: published is {row['published']!r}, and must be a number")
        if not (folder / f"{row['case']}.py").is_file():
            raise FigureError(f"{place}: no case {folder / row['case']}.py")
        run = Run(row["card"], row["torch"] or SECOND_TORCH, row["libraries"], row["case"], row["arguments"])
        key = (run, row["label"], row["what"], row["source"])
        if key in seen:
            raise FigureError(f"{place}: the same figure as in {seen[key]}")
        seen[key] = place
        kept = {name: row[name] for name in ("torch", "label", "what", "published", "unit", "cause")}
        figures.append(Figure(source=sources[row["source"]], run=run, **kept))
    if not figures:
        raise FigureError(f"{folder / 'figures.csv'} has no figures below its header")
    return figures
