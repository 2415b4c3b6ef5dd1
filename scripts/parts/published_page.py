"""The comparison as text, as JSON and as the generated part of `docs/accuracy.md`."""

from __future__ import annotations

import datetime
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .published_figures import NEWEST, ROOT, UNITS, Figure, FigureError
from .published_kept import COMPUTED, NEWEST_LINE, Kept, Page, read_page
from .published_picture import picture

PAGE = ROOT / "docs/accuracy.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs/gallery/accuracy.svg"
BEGIN = "<!-- scripts/published writes from here -->"
END = "<!-- to here -->"


@dataclass
class Compared:
    """A published figure and ours, in bytes: by torch, with the torch of the source under the empty name."""

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
        """Our number at one digit more than the published one."""
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
            "newest": self.ours.get(NEWEST),
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


Entry = Compared | Kept


def quantile(sorted_values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
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
        if NEWEST in entry.ours:
            beside = f"; torch {NEWEST}: {'equal' if entry.equal(NEWEST) else entry.shown(NEWEST)}"
        cause = f"; {entry.figure.cause}" if entry.figure.cause else ""
        print(f"{entry}{beside}{cause}")
    print(summary(compared))


def write_page(ran: list[Compared], figures: list[Figure]) -> None:
    """Writes the generated parts of the page and of README, and the picture. Figures that did not run keep
    their rows."""
    page = read_page(PAGE)
    done = {entry.figure: entry for entry in ran}
    compared: list[Entry] = [done.get(figure) or page.kept(figure, place(figure)) for figure in figures]
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit()}"
    page.computed |= {figure.source.title: today for figure in done}
    replace_between(PAGE, BEGIN, END, f"\n\n{generated(compared, page)}\n")
    # Of the page's own rows, so that a reader, and a test, can count them.
    page = read_page(PAGE)
    rows: list[Entry] = [page.kept(figure, place(figure)) for figure in figures]
    replace_between(README, "<!-- published -->", "<!-- /published -->", sentences(rows))
    memory = [entry for entry in compared if entry.figure.unit not in ("", "tokens")]
    pairs = [(float(e.figure.number) * UNITS[e.figure.unit], e) for e in memory]
    PICTURE.write_text(picture([(size, size * (1 + e.error())) for size, e in pairs]), encoding="utf-8")


def commit() -> str:
    """The last commit that changed the Rust code, of which a case runs a build."""
    asked = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "src"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def replace_between(path: Path, begin: str, end: str, part: str) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise FigureError(f"{path} must have these two marks once, in this order: {begin} and {end}")
    head, rest = text.split(begin)
    path.write_text(f"{head}{begin}{part}{end}{rest.split(end)[1]}", encoding="utf-8")


def sentences(compared: list[Entry]) -> str:
    """README's sentences: the numbers of the distribution."""
    errors = sorted(abs(entry.error()) for entry in compared)
    equal = sum(entry.equal() for entry in compared)
    near = sum(error <= 0.005 for error in errors)
    return (
        f"Of {len(compared)} memory figures that others measured on {len(models(compared))} real cards and "
        f"published, {equal}\nare equal on the phantom to the last published digit and {near} within 0.5 %;\n"
        f"the median error is {quantile(errors, 0.5):.2%}, the 90th percentile {quantile(errors, 0.9):.2%}. "
    )


def models(compared: list[Entry]) -> list[str]:
    """The cards, each once however many of them a run had and whatever it changed of them."""
    return sorted({re.sub(r"^[0-9]+x|,.*", "", entry.figure.run.card) for entry in compared})


def generated(compared: list[Entry], page: Page) -> str:
    parts = ["## Distribution", distribution(compared, page), "## The worst first", worst(compared)]
    for source in dict.fromkeys(entry.figure.source for entry in compared):
        entries = [entry for entry in compared if entry.figure.source == source]
        parts += [f"## {source.title}", f"<{source.address}>", f"Measured: {source.measured}."]
        parts += [f"{source.note}."] if source.note else []
        parts += [f"{COMPUTED}{page.computed[source.title]}."] if source.title in page.computed else []
        parts += [table(entries)]
    return "\n\n".join(parts) + "\n"


def distribution(compared: list[Entry], page: Page) -> str:
    errors = sorted(abs(entry.error()) for entry in compared)
    equal = sum(entry.equal() for entry in compared)
    cards = models(compared)
    quantities = Counter(entry.figure.what for entry in compared)
    rows = [
        ("figures", str(len(compared))),
        ("sources", str(len({entry.figure.source.source for entry in compared}))),
        ("cards", f"{len(cards)}: {', '.join(cards)}"),
        ("quantities", ", ".join(f"{name} {count}" for name, count in quantities.most_common())),
        ("equal to the last published digit", f"{equal}, {equal / len(compared):.1%}"),
        ("median error", f"{quantile(errors, 0.5):.2%}"),
        ("90th percentile", f"{quantile(errors, 0.9):.2%}"),
        ("99th percentile", f"{quantile(errors, 0.99):.2%}"),
        ("largest error", f"{errors[-1]:.2%}"),
        ("median and largest error by quantity", "; ".join(by_quantity(compared, quantities))),
    ]
    have = [entry for entry in compared if entry.ours.get(NEWEST) is not None]
    if any(isinstance(entry, Kept) for entry in compared):
        # A row does not tell whether the newest torch gave the same number or none.
        if page.newest_line:
            rows.append((NEWEST_LINE, page.newest_line))
    elif have:
        same = sum(entry.equal(NEWEST) for entry in have)
        rows.append((NEWEST_LINE, f"{same} of the {len(have)} that ran there"))
    builds = Counter(entry.figure.run.torch for entry in compared)
    rows.append(("torch", ", ".join(f"{torch} {count}" for torch, count in builds.most_common())))
    return markdown(("", ""), rows)


def by_quantity(compared: list[Entry], quantities: Counter[str]) -> Iterable[str]:
    for name, _ in quantities.most_common():
        errors = sorted(abs(entry.error()) for entry in compared if entry.figure.what == name)
        yield f"{name} {quantile(errors, 0.5):.2%} and {errors[-1]:.2%}"


def worst(compared: list[Entry]) -> str:
    """One line for each cause: its largest error, and the figures that have it."""
    different = sorted((entry for entry in compared if not entry.equal()), key=lambda e: -abs(e.error()))
    causes: dict[tuple[str, str], list[Entry]] = {}
    for entry in different:
        causes.setdefault((entry.figure.source.source, entry.figure.cause), []).append(entry)
    rows = []
    for (source, cause), entries in causes.items():
        largest, count = entries[0], str(len(entries))
        case = f"{place(largest.figure)} on {largest.figure.run.card}"
        why = cause or "none looked for: below 0.5 %"
        rows.append(
            (f"{largest.error():+.2%}", count, source, case, published(largest), largest.shown(), why)
        )
    if not rows:
        return "Every figure is equal to the last published digit."
    head = ("largest error", "figures", "source", "the figure of that error", "published", "ours", "cause")
    return f"All {len(different)} figures that differ, by cause:\n\n{markdown(head, rows)}"


def table(entries: list[Entry]) -> str:
    """One line per case and error: the figures of a sweep that are equal share a line."""
    rows = []
    for entry in entries:
        newest = entry.shown(NEWEST) if entry.ours.get(NEWEST) is not None else entry.shown()
        beside = [f"torch {NEWEST}: {newest}"] if newest != entry.shown() else []
        error = "equal" if entry.equal() else f"{entry.error():+.2%}"
        notes = "; ".join([*beside, *filter(None, [entry.figure.cause])])
        rows.append(
            (entry.figure.run.card, place(entry.figure), published(entry), entry.shown(), error, notes)
        )
    return markdown(("card", "case", "published", "ours", "error", "cause, newest torch"), rows)


def place(figure: Figure) -> str:
    torch = f", torch {figure.torch}" if figure.torch else ""
    libraries = f" {figure.run.libraries}" if figure.run.libraries else ""
    what = "" if figure.what == "allocated" else f", {figure.what}"
    # The label tells the value of an option that has several.
    options = " ".join(re.sub(r"--\S+(?: [^-\s]\S*){2,}", "", figure.run.arguments).split())
    options = re.sub(r"(?: \d+x\d+){2,}", "", options)
    call = f"{figure.run.case} {options}".strip()
    return f"`{call}` {figure.label}{what}{torch}{libraries}"


def published(entry: Entry) -> str:
    return f"{entry.figure.published} {entry.figure.unit}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
