"""The rows of `memtrace ledger --host` beside the kernel's figures. For scripts/host-corpus."""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from pathlib import Path

from .built import BUILT
from .host_runs import LONGEST, start

MOST_ERROR = 0.01


def sums(name: str) -> tuple[str, bool]:
    """Runs a program and compares the ledger's figures with the kernel's. Returns a row of the table, and
    whether all figures are right."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        process = start([name], out, None)
        text, errors = process.communicate(timeout=LONGEST)
        points = [line.removeprefix("POINT") for line in text.splitlines() if line.startswith("POINT")]
        found = [json.loads(point) for point in points]
        if process.returncode or not found:
            return f"| {name} | failed: {errors.strip().splitlines()[-1:]} | | | |", False
        traces = {path: json.loads(meta_of(path)) for path in out.glob("*.csv")}
        worst = {"pss": 0.0, "rss": 0.0, "group": 0.0}
        largest = ""
        for at in found:
            answers = (of_trace(path, meta, at["unix_ns"]) for path, meta in traces.items())
            state = min(filter(None, answers), key=lambda state: distance(state["pss_bytes"], at["pss"]))
            for key in ("pss", "rss"):
                total = sum(row[f"{key}_bytes"] for row in state["rows"])
                worst[key] = max(worst[key], distance(total, at[key]))
            if "group" in at:
                used = state["container"]["current_bytes"]
                worst["group"] = max(worst["group"], distance(used, at["group"]))
            largest = max(state["rows"], key=lambda row: row["pss_bytes"])["held_by"]
        shown = " | ".join(f"{100 * worst[key]:.2f} %" for key in ("pss", "rss", "group"))
        return f"| {name} | {len(found)} | {shown} | {largest} |", max(worst.values()) <= MOST_ERROR


def distance(figure: int, between: list[int]) -> float:
    """Returns by how much a figure is outside the range of the kernel's counts before and after it, as a
    share of the larger count."""
    low, high = between
    return max(low - figure, figure - high, 0) / max(high, 1)


def meta_of(path: Path) -> str:
    with path.open(newline="") as file:
        return next(csv.DictReader(file))["name"]


def of_trace(path: Path, meta: dict, unix_ns: int) -> dict | None:
    """Returns the ledger of a process at a time, or `None` if the process had ended before."""
    at = (unix_ns - meta["start_unix_ns"]) / 1e9
    words = [BUILT / "memtrace", "ledger", "--host", "--json", "--at", f"{max(at, 0):.6f}s", path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "no match in" in done.stderr:
        return None
    done.check_returncode()
    return json.loads(done.stdout)["host"][0]
