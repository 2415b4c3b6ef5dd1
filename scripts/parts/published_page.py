"""Writes the comparison as text, as JSON, into `docs/accuracy.csv` and into `docs/accuracy.md`."""

from __future__ import annotations

import datetime
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .built import ROOT
from .page_block import PageBlock
from .published_data import Row, in_order, read_rows, write_rows
from .published_figures import SECOND_TORCH, UNITS, Figure
from .published_picture import picture

PAGE = ROOT / "docs/accuracy.md"
DATA = ROOT / "docs/accuracy.csv"
README = ROOT / "README.md"
PICTURE = ROOT / "docs/gallery/accuracy.svg"
PART = PageBlock(PAGE, "<!-- scripts/published writes from here -->", "<!-- to here -->")
# The relative difference above which a figure needs a cause.
LIMIT = 0.005


@dataclass
class Compared:
    """A published figure, and our numbers by version of torch. The number of the run with the figure's own
    torch has the empty name."""

    figure: Figure
    ours: dict[str, int | None]
    failure: str

    @property
    def measured(self) -> int | None:
        return self.ours[""]

    def off(self, limit: float) -> bool:
        return (
            self.measured is not None and abs(self.figure.error(self.measured)) > limit and not self.equal()
        )

    def equal(self, torch: str = "") -> bool:
        measured = self.ours.get(torch)
        return measured is not None and self.figure.equal(measured)

    def error(self) -> float:
        assert self.measured is not None
        return 0.0 if self.equal() else self.figure.error(self.measured)

    def shown(self, torch: str = "") -> str:
        """Returns our number with one digit more than the published number, or the published
        number if both are equal."""
        measured = self.ours.get(torch)
        if measured is None:
            return "-"
        if self.equal(torch):
            return self.figure.published
        ours = self.figure.in_unit(measured)
        decimals = len(self.figure.published.partition(".")[2])
        return (
            f"{ours:.{min(decimals + 1, 4)}f}" if self.figure.unit not in ("B", "tokens") else f"{ours:.0f}"
        )

    def record(self) -> dict[str, object]:
        figure, run = self.figure, self.figure.run
        return {
            "source": figure.source.source,
            "card": run.card,
            "torch": run.torch,
            "libraries": run.libraries,
            "case": run.case,
            "arguments": run.arguments,
            "label": figure.label,
            "what": figure.what,
            "published": figure.published,
            "unit": figure.unit,
            "ours": self.measured,
            "second_torch": self.ours.get(SECOND_TORCH),
            "error": None if self.measured is None else self.error(),
            "equal": self.equal(),
            "cause": figure.cause,
            "failure": self.failure,
        }

    def __str__(self) -> str:
        error = "failed" if self.measured is None else "equal" if self.equal() else f"{self.error():+.2%}"
        figure = self.figure
        return (
            f"{figure.source.source} {figure.run.case} {figure.label} {figure.what} on {figure.run.card}: "
            f"published {figure.published} {figure.unit}, ours {self.shown()}, {error}"
        )


def quantile(sorted_values: list[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed."""
    return sorted_values[max(0, -int(-len(sorted_values) * share // 1) - 1)]


def summary(compared: Iterable[Compared]) -> str:
    entries = [entry for entry in compared if entry.measured is not None]
    if not entries:
        return "no figure"
    errors = sorted(abs(entry.error()) for entry in entries)
    equal = sum(entry.equal() for entry in entries)
    return (
        f"{len(entries)} figures of {len({e.figure.source.source for e in entries})} sources on "
        f"{len({e.figure.run.card for e in entries})} cards: {equal} equal to the last published digit "
        f"({equal / len(entries):.0%}), median error {quantile(errors, 0.5):.2%}, "
        f"90th percentile {quantile(errors, 0.9):.2%}, largest {errors[-1]:.2%}"
    )


def print_table(compared: list[Compared]) -> None:
    for entry in compared:
        beside = ""
        if SECOND_TORCH in entry.ours:
            shown = "equal" if entry.equal(SECOND_TORCH) else entry.shown(SECOND_TORCH)
            beside = f"; torch {SECOND_TORCH}: {shown}"
        cause = f"; {entry.figure.cause}" if entry.figure.cause else ""
        print(f"{entry}{beside}{cause}")
    print(summary(compared))


def write_page(ran: list[Compared], figures: list[Figure]) -> None:
    """Writes docs/accuracy.csv, and from it the page, README's sentences and the picture.

    The rows of figures that did not run stay unchanged.
    """
    rows = read_rows(DATA, figures)
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit()}"
    rows |= {entry.figure: row_of(entry, rows.get(entry.figure), today) for entry in ran}
    write_rows(DATA, in_order(rows, figures))
    write_from_data(figures)


def row_of(entry: Compared, before: Row | None, computed: str) -> Row:
    """Returns the row of a figure. Without a run on the second torch, the number of the row before stays."""
    error = "0" if entry.equal() else f"{entry.error() * 100:.4f}"
    second = before.second_torch if before else ""
    if entry.ours.get(SECOND_TORCH) is not None:
        second = entry.shown(SECOND_TORCH) if entry.shown(SECOND_TORCH) != entry.shown() else ""
    return Row(entry.figure, entry.shown(), second, error, computed)


def write_from_data(figures: list[Figure]) -> None:
    rows = in_order(read_rows(DATA, figures), figures)
    PART.write(f"\n\n{generated(rows)}\n\n")
    PageBlock.named(README, "published").write(sentences(rows))
    memory = [row for row in rows if row.figure.unit not in ("", "tokens")]
    pairs = [(float(row.figure.number) * UNITS[row.figure.unit], row) for row in memory]
    drawn = picture([(size, size * (1 + row.error())) for size, row in pairs])
    PICTURE.write_text(drawn, encoding="utf-8")


def commit() -> str:
    """Returns the last commit that changed the Rust code, because a case runs a build of that code."""
    asked = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "src"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def sentences(rows: list[Row]) -> str:
    """Returns README's sentences about the distribution of the errors."""
    errors = sorted(abs(row.error()) for row in rows)
    equal = sum(row.equal() for row in rows)
    near = sum(error <= LIMIT for error in errors)
    return (
        f"Of {len(rows)} memory figures that others measured on {len(models(rows))} real cards and "
        f"published, {equal}\nare equal on the simulated GPU to the last published digit "
        f"and {near} within 0.5%;\n"
        f"the median error is {quantile(errors, 0.5):.2%}, the 90th percentile {quantile(errors, 0.9):.2%}. "
    )


def models(rows: list[Row]) -> list[str]:
    """Returns the card models, each once, without counts and modified properties."""
    return sorted({re.sub(r"^[0-9]+x|[, ].*", "", row.figure.run.card) for row in rows})


def generated(rows: list[Row]) -> str:
    parts = ["## All figures", distribution(rows), training(rows)]
    parts += ["## By source", by_source(rows)]
    parts += ["## Every difference above 0.5%", differences(rows)]
    return "\n\n".join(parts)


def distribution(rows: list[Row]) -> str:
    errors = sorted(abs(row.error()) for row in rows)
    equal = sum(row.equal() for row in rows)
    near = sum(error <= LIMIT for error in errors)
    cards = models(rows)
    quantities = Counter(row.figure.what for row in rows)
    builds = Counter(row.figure.run.torch for row in rows)
    table = [
        ("figures", str(len(rows))),
        ("sources", str(len({row.figure.source.source for row in rows}))),
        ("cards", f"{len(cards)}: {', '.join(cards)}"),
        ("quantities", ", ".join(f"{name} {count}" for name, count in quantities.most_common())),
        ("torch", ", ".join(f"{torch} {count}" for torch, count in builds.most_common())),
        ("equal to the last published digit", f"{equal}, {equal / len(rows):.1%}"),
        ("within 0.5%", f"{near}, {near / len(rows):.1%}"),
        ("median error", f"{quantile(errors, 0.5):.2%}"),
        ("90th percentile", f"{quantile(errors, 0.9):.2%}"),
        ("99th percentile", f"{quantile(errors, 0.99):.2%}"),
        ("largest error", f"{errors[-1]:.2%}"),
        (f"ours differs on torch {SECOND_TORCH}", str(sum(bool(row.second_torch) for row in rows))),
    ]
    return markdown(("", ""), table)


def training(rows: list[Row]) -> str:
    """Returns the errors of whole training runs, by quantity."""
    own = [row for row in rows if row.figure.source.kind == "training"]
    lines = []
    for what, count in Counter(row.figure.what for row in own).most_common():
        errors = sorted(abs(row.error()) for row in own if row.figure.what == what)
        parts = (quantile(errors, 0.5), quantile(errors, 0.9), errors[-1])
        lines.append((what, str(count), *(f"{part:.2%}" for part in parts)))
    head = ("of whole training runs", "figures", "median error", "90th percentile", "largest error")
    return (
        f"{len(own)} of these figures are of whole training runs: full fine-tuning, LoRA, QLoRA, FSDP, "
        f"tensor parallelism.\n\n{markdown(head, lines)}"
    )


def by_source(rows: list[Row]) -> str:
    """Returns one line per source: what it measured, and how close our numbers are."""
    lines = []
    for source in dict.fromkeys(row.figure.source for row in rows):
        own = [row for row in rows if row.figure.source == source]
        near = sum(abs(row.error()) <= LIMIT for row in own)
        worst = max(own, key=lambda row: abs(row.error()))
        error = "equal" if all(row.equal() for row in own) else f"{worst.error():+.2%}"
        title = f"[{source.title}]({source.address})"
        counts = (str(len(own)), str(sum(row.equal() for row in own)), str(near))
        lines.append((title, source.measured, *counts, error))
    return markdown(("source", "measured", "figures", "equal", "within 0.5%", "largest error"), lines)


def differences(rows: list[Row]) -> str:
    """Returns a numbered list of the causes: the largest error, the number of figures, an example."""
    causes: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: -abs(row.error())):
        if abs(row.error()) > LIMIT and not row.equal():
            causes.setdefault((row.figure.source.title, row.figure.cause), []).append(row)
    if not causes:
        return "Every figure is within 0.5%."
    items = []
    for (title, cause), own in causes.items():
        figure = own[0].figure
        numbers = f"{own[0].ours} instead of {figure.published} {figure.unit}"
        figures = "1 figure" if len(own) == 1 else f"{len(own)} figures"
        case = f"{place(figure)} on {figure.run.card} ({title})"
        items.append(f"1. **{own[0].error():+.2%}**, {figures}: {case}, {numbers}.\n   {sentence(cause)}")
    count = sum(len(own) for own in causes.values())
    return f"{count} figures, by cause, with the largest error of each:\n\n" + "\n".join(items)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def place(figure: Figure) -> str:
    what = "" if figure.what == "allocated" else f", {figure.what}"
    return f"`{figure.run.case}` {figure.label}{what}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
