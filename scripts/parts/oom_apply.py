"""Runs of the cases with what `memtrace oom` advises. For scripts/oom-corpus."""

from __future__ import annotations

import csv
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .oom_runs import ALLOCATOR, FOLDER, Case, Way, asked, read_cases, run

APPLIED = FOLDER / "applied.csv"
# For each program: the index of the argument that is the batch size.
BATCHES = {"gpt.py": 1, "llama.py": 2, "vit.py": 2, "diffusion.py": 2, "retry.py": 1}
# Patterns of advice that tests/oom/applied.py can apply to any program, each with the change that it makes.
APPLICABLE = [
    (r"(--(checkpoint|optimizer|offload|autocast|dtype) ('[^']*'|\S+))$", r"\1"),
    (r".*\bfused=True", "fused"),
]


def option_of(line: str) -> str:
    """Returns the option of `memtrace advise` that a line of advice names, or the line up to its first
    colon."""
    found = re.search(r"\(code: memtrace advise (.*) TRACE\): ", line)
    return found[1] if found else line.split(": ")[0]


@dataclass(frozen=True)
class Applied:
    """One row of applied.csv: a line of advice of `memtrace oom`, and the run with it."""

    name: str  # the name of the case
    advice: str  # the option of memtrace advise, or the line of advice up to its first colon
    alone: str  # `no` if memtrace oom says that it may not be enough alone
    finishes: str  # `yes`, `no`, or the error of a program that the change does not suit


def way_with(case: Case, line: str) -> Way | None:
    """Returns the way to run a case that applies a line of advice, or None if only an
    edit of the program can."""
    as_is = Way(case.card, case.steps, case.options)
    setting = re.match(rf"{ALLOCATOR}=\S+", line)
    if setting:
        return replace(as_is, change=setting[0])
    for form, change in APPLICABLE:
        found = re.match(form, option_of(line))
        if found:
            return replace(as_is, applied=found.expand(change))
    return None


def smaller(case: Case, line: str) -> Case | None:
    """Returns the case with the smaller batch that a line of advice names, or None."""
    words, parts = case.program.split(), re.match(r"--batch x1/(\d+)", option_of(line))
    place = BATCHES.get(words[0])
    if not parts or place is None or int(words[place]) < int(parts[1]):
        return None
    words[place] = str(int(words[place]) // int(parts[1]))
    return replace(case, program=" ".join(words))


def applied(case: Case, trace: Path) -> list[Applied]:
    """Runs a case once for each applicable line of advice for its trace."""
    rows = []
    for line in asked(trace)[1]:
        other, way = smaller(case, line), way_with(case, line)
        if other:
            way = Way(case.card, case.steps, case.options)
        if not way:
            continue
        with tempfile.TemporaryDirectory(prefix="memtrace-oom-") as name:
            done = run(other or case, way, Path(name, "out"), fork=True)
        is_other_error = done.status and not done.ooms and "OutOfMemory" not in done.error
        finishes = done.error if is_other_error else "no" if done.status else "yes"
        text = option_of(line)
        rows.append(Applied(case.name, text, "no" if "enough alone" in line else "", finishes))
        print(f"{case.name}: {line.split('; costs')[0]}: {finishes}", file=sys.stderr, flush=True)
    return rows


def write_applied(rows: list[Applied], names: set[str]) -> None:
    """Writes the rows of these cases into applied.csv, and keeps the rows of other cases."""
    known = []
    if APPLIED.exists():
        with APPLIED.open(newline="") as file:
            known = [Applied(**row) for row in csv.DictReader(file)]
    order = list(read_cases())
    all_rows = [row for row in known if row.name not in names] + rows
    all_rows.sort(key=lambda row: order.index(row.name))
    with APPLIED.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Applied.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in all_rows)


def applied_table() -> str:
    """Returns the summary of the results in applied.csv."""
    with APPLIED.open(newline="") as file:
        rows = [Applied(**row) for row in csv.DictReader(file)]
    failed = [row for row in rows if row.finishes != "yes"]
    suits = [row for row in rows if row.finishes in ("yes", "no")]
    sure, weak = ([row for row in suits if row.alone == alone] for alone in ("", "no"))
    finish = [sum(row.finishes == "yes" for row in some) for some in (sure, weak)]
    lines = [
        f"With one line of advice applied, {finish[0]} of {len(sure)} runs finish; of {len(weak)} lines that "
        f"*may not be enough alone*, {finish[1]} do. The others, with errors of changes that do not suit:",
        "",
        "| case | advice | said to be weak | finishes |",
        "| :--- | :--- | :--- | :--- |",
    ]
    lines += [
        f"| {row.name} | `{row.advice}` | {'yes' if row.alone else ''} | {row.finishes} |" for row in failed
    ]
    return "\n".join(lines)
