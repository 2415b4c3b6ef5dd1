"""The tables of docs/versions.md, from the rows of docs/versions.csv."""

from __future__ import annotations

from pathlib import Path

from parts.page_block import PageBlock
from parts.version_checks import CHECKS

MARKS = {"yes": "yes", "no": "no", "failed": "**failed**", "impossible": "—", "not run": "not run"}
HEADINGS = {"x86-64": "", "aarch64": "On aarch64, under qemu:\n\n"}


def write_page(rows: list[dict], torches: list[str], pythons: list[str], page: Path) -> None:
    """Writes a table for each machine between the two marks of a page."""
    tables = [
        heading + table([row for row in rows if row["machine"] == machine], torches, pythons)
        for machine, heading in HEADINGS.items()
    ]
    PageBlock.named(page, "cells").write("\n" + "".join(tables))


def table(rows: list[dict], torches: list[str], pythons: list[str]) -> str:
    """Returns a line for each cell that was tried, then the reasons of what is not `yes`."""
    lines = [
        f"| torch | Python | {' | '.join(CHECKS.values())} |",
        f"| --- | --- | {' | '.join('---' for _ in CHECKS)} |",
    ]
    reasons = {}
    for torch in torches:
        for python in pythons:
            cell = [row for row in rows if (row["torch"], row["python"]) == (torch, python)]
            if not cell:
                lines.append(f"| {torch} | {python} |{' not run |' * len(CHECKS)}")
                continue
            for row in cell:
                if row["detail"]:
                    reasons.setdefault(row["detail"], []).append(place(row))
            if cell[0]["check"] == "install":
                mark = f" {MARKS[cell[0]['result']]} |"
                lines.append(f"| {torch} | {python} |{mark * len(CHECKS)}")
                continue
            results = {row["check"]: MARKS[row["result"]] for row in cell}
            marks = " | ".join(results.get(check, "not run") for check in CHECKS)
            free = "t" if python.endswith("t") else ""
            lines.append(f"| {torch} | {cell[0]['version']}{free} | {marks} |")
    text = "\n".join(lines) + "\n\n"
    for reason, places in reasons.items():
        text += f"- {'; '.join(places)}: {reason.replace('<', '&lt;')}\n"
    return text + "\n"


def place(row: dict) -> str:
    """Returns the name of a cell, and of one of its checks."""
    cell = f"torch {row['torch']} on {row['python']}"
    return cell if row["check"] == "install" else f"{cell}, {CHECKS[row['check']]}"
