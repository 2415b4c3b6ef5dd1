"""The true cause of each case by reruns, beside the verdict of `memtrace oom`. For scripts/oom-corpus."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .built import answer
from .oom_apply import APPLIED, applied_table
from .oom_runs import ALLOCATOR, FOLDER, LARGER, Case, Run, Way, asked, read_cases, run, settings
from .page_block import PageBlock

MEASURED = FOLDER / "measured.csv"
PAGE = FOLDER / "README.md"
# Memory grows if a run with twice as many steps needs more than this many times the bytes.
GROWS = 1.1


@dataclass(frozen=True)
class Measured:
    """One row of measured.csv: the reruns of a case, and the answer of `memtrace oom`; sizes in bytes."""

    name: str
    capacity: int  # the memory of the card
    requested: int  # the size of the request that ran out of memory
    needs: int  # the peak of the device's used memory on a larger card
    reserved: int  # the peak of the memory that PyTorch reserves on the larger card
    allocated: int  # the peak of PyTorch's blocks on the larger card
    allocated_twice: int  # the peak of PyTorch's blocks on the larger card with twice as many steps
    expandable: str  # whether it fits with expandable segments; empty if its blocks alone are too large
    remedy: str  # whether it finishes with the remedy: yes or no; empty without a remedy
    alone: str  # whether it fits with the change `alone` of its case: yes or no; empty without one
    others: str  # whether other processes use the card: yes or no
    verdict: str  # the verdict of memtrace oom; empty without an OOM
    named: str  # whether memtrace oom names the remedy: yes or no; empty if no advice could name it

    @staticmethod
    def read(row: dict[str, str]) -> Measured:
        """Parses a row of measured.csv."""
        sizes = ("capacity", "requested", "needs", "reserved", "allocated", "allocated_twice")
        return Measured(**(row | {size: int(row[size]) for size in sizes}))


def packed(found: Measured | Run) -> int:
    """Returns the bytes that a program would need if PyTorch reserved only the allocated memory."""
    used = found.needs if isinstance(found, Measured) else found.used
    return used - found.reserved + found.allocated


def derived_cause(case: Case, found: Measured) -> str:
    """Returns the cause that the reruns show."""
    if "--phantom-fault" in case.options:
        return "injected" if found.needs <= found.capacity else "unknown"
    if found.requested > found.capacity:
        return "request too large"
    if found.alone == "yes":
        return "another process" if found.others == "yes" else "outside torch"
    if found.allocated_twice > GROWS * found.allocated:
        return "memory grows"
    if found.needs > found.capacity and packed(found) <= found.capacity:
        return "fragmentation"
    if found.needs <= found.capacity:
        return "a limit"
    return "memory is kept" if case.releases and found.remedy == "yes" else "too big"


def is_right(case: Case, verdict: str) -> bool:
    """Returns whether a verdict is the cause of the case, or the second right verdict."""
    return verdict in (case.cause, case.also) and bool(verdict)


def read_measured() -> dict[str, Measured]:
    """Returns the rows of measured.csv by name."""
    if not MEASURED.exists():
        return {}
    with MEASURED.open(newline="") as file:
        return {row["name"]: Measured.read(row) for row in csv.DictReader(file)}


def measured(case: Case, folder: Path) -> tuple[Measured, list[str]]:
    """Runs a case in every way. Returns the figures, and the problems with the case."""
    as_is = Way(case.card, case.steps, case.options)
    without_fault = re.sub(r"--phantom-fault \S+", "", case.options)
    larger = replace(as_is, card=re.sub(r"\bmem=\w+", f"mem={LARGER}", case.card), options=without_fault)
    if larger.card == case.card:
        raise RuntimeError("the card of a case needs mem=, to be replaced by a larger one")
    allocator = settings(case.environment)[0].get(ALLOCATOR)
    expandable = f"{ALLOCATOR}={allocator + ',' if allocator else ''}expandable_segments:True"
    first = run(case, as_is, folder / "as-is")
    large = run(case, larger, folder / "larger", fork=True)
    twice = large
    if case.steps > 1:
        twice = run(case, replace(larger, steps=2 * case.steps), folder / "twice", fork=True)
    remedied = None
    if case.remedy:
        remedied = run(case, replace(as_is, change=case.remedy), folder / "remedy", fork=True)
    alone = None
    if case.alone:
        card = case.alone.removeprefix("card ")
        way = replace(as_is, card=card) if card != case.alone else replace(as_is, change=case.alone)
        alone = run(case, way, folder / "alone")
    verdict, advice, requested, capacity = asked(folder / "as-is")
    expanded = None
    if packed(large) <= capacity:
        expanded = run(case, replace(as_is, change=expandable), folder / "expandable")
    row = Measured(
        name=case.name,
        capacity=capacity,
        requested=requested,
        needs=large.used,
        reserved=large.reserved,
        allocated=large.allocated,
        allocated_twice=twice.allocated,
        expandable=expanded.fits if expanded else "",
        remedy=("no" if remedied.status else "yes") if remedied else "",
        alone=alone.fits if alone else "",
        others="yes" if "others=" in case.card or first.processes > 1 else "no",
        verdict=verdict,
        named=named(case, advice),
    )
    problems = []
    if not verdict:
        problems.append(f"did not run out of memory: {first.error}")
    elif derived_cause(case, row) != case.cause:
        problems.append(f"the reruns show {derived_cause(case, row)!r}, cases.csv says {case.cause!r}")
    if large.fits == "no":
        problems.append(f"fails on a larger card: {large.error}")
    if row.remedy == "no":
        problems.append(f"the remedy does not help: {remedied.error}")
    return row, problems


def blamed(trace: Path) -> list[str]:
    """Returns the holders that the reports on a trace blame for memory that is kept without need."""
    found = [oom["kept"]["holder"] for oom in answer("oom", trace)["ooms"] if oom["kept"]]
    for process in answer("leaks", trace)["processes"]:
        holders = (process["retained"] or {}).get("holders", [])
        found += [holder["holder"] for holder in holders if holder["is_retained"]]
    return found


def precision(case: Case, folder: Path) -> tuple[list[str], list[str]]:
    """Runs a case on a larger card and on its own card. Returns the holders that the reports blame in each
    run."""
    options = re.sub(r"--phantom-fault \S+", "", case.options)
    larger = Way(re.sub(r"\bmem=\w+", f"mem={LARGER}", case.card), case.steps, options)
    ways = {"larger": larger, "as-is": Way(case.card, case.steps, case.options)}
    for name, way in ways.items():
        if not (folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            run(case, way, folder / name, fork=True)
    both = blamed(folder / "larger"), blamed(folder / "as-is")
    print(f"{case.name}: larger card: {both[0] or 'nobody'}; its card: {both[1] or 'nobody'}", flush=True)
    return both


def named(case: Case, advice: list[str]) -> str:
    """Returns whether the advice names the remedy of a case: `yes`, `no`, or empty if no advice could. A line
    that calls the remedy useless does not count."""
    if not case.advice:
        return ""
    given = [line for line in advice if "may not help" not in line]
    return "yes" if any(re.search(case.advice, line) for line in given) else "no"


def table(rows: list[Measured]) -> str:
    """Returns the table of verdicts, with a row for each case."""
    cases = read_cases()
    lines = [
        [
            "case",
            "cause",
            "needs",
            "card",
            "twice the steps",
            "expandable",
            "remedy",
            "verdict",
            "remedy named",
        ],
        [":---", ":---", *["---:"] * 3, *[":---"] * 4],
    ]
    for row in rows:
        case = cases[row.name]
        more = f"{100 * (row.allocated_twice / row.allocated - 1):+.0f}%" if row.allocated else ""
        verdict = row.verdict if is_right(case, row.verdict) else f"**{row.verdict or 'none'}**"
        needs, card = (f"{size / 2**20:,.0f}" for size in (row.needs, row.capacity))
        lines.append(
            [row.name, case.cause, needs, card, more, row.expandable, row.remedy, verdict, row.named]
        )
    right = sum(is_right(cases[row.name], row.verdict) for row in rows)
    with_advice = [row.named == "yes" for row in rows if row.named]
    return "\n".join(
        [
            f"The verdict is right in {right} of {len(rows)} cases; "
            f"the known remedy is named in {sum(with_advice)} of {len(with_advice)}.",
            "",
            *("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


def page() -> str:
    """Returns the page with the table of measured.csv."""
    made = table(list(read_measured().values()))
    if APPLIED.exists():
        made += f"\n\n{applied_table()}"
    return PageBlock.named(PAGE, "judged").page_with(f"\n{made}\n")


def stale() -> list[str]:
    """Returns the cases whose cause does not follow from measured.csv, and the page if its rows differ."""
    cases, rows = read_cases(), read_measured()
    causes = {name: derived_cause(cases[name], rows[name]) for name in cases if name in rows}
    wrong = [f"{name}: no row in measured.csv" for name in cases if name not in rows]
    wrong += [f"{name}: no row in cases.csv" for name in rows if name not in cases]
    wrong += [
        f"{name}: measured.csv shows {cause!r}, cases.csv says {cases[name].cause!r}"
        for name, cause in causes.items()
        if cause != cases[name].cause
    ]
    return wrong or [f"{PAGE.name}: another table"] * (PAGE.read_text() != page())


def write(rows: list[Measured]) -> None:
    """Writes rows into measured.csv, and its table into the page."""
    known = read_measured() | {row.name: row for row in rows}
    ordered = [known[name] for name in read_cases() if name in known]
    with MEASURED.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Measured.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in ordered)
    PAGE.write_text(page())


def judged(case: Case, trace: Path) -> Measured:
    """Returns the row of a case with the current answer for its trace, which is created if it is missing."""
    if not trace.exists():
        run(case, Way(case.card, case.steps, case.options), trace)
    verdict, advice, *_ = asked(trace)
    return replace(read_measured()[case.name], verdict=verdict, named=named(case, advice))


def rerun(case: Case, keep: Path | None) -> tuple[Measured | None, list[str]]:
    """Runs `measured` in a temporary folder. With `keep`, copies the trace of the
    unchanged case to that folder."""
    with tempfile.TemporaryDirectory(prefix="memtrace-oom-") as name:
        try:
            row, problems = measured(case, Path(name))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row, problems = None, [str(error)]
        if keep and row:
            shutil.rmtree(keep / case.name, ignore_errors=True)
            shutil.copytree(Path(name) / "as-is", keep / case.name)
    print(
        f"{case.name}: {row.verdict if row else ''}; {'; '.join(problems) or 'ok'}",
        file=sys.stderr,
        flush=True,
    )
    return row, problems
