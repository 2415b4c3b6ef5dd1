"""Compares PyTorch's FSDPMemTracker with memtrace on the models of ../seeds/sharded_models.py, and checks
that docs/coming-from.md shows the results.

    sharded.py MEMTRACE PAGE RUN...

A RUN is a folder with the traces of a run of ../seeds/sharded.py in `trace`, and its output in `answers`.
With MEMTRACE_BLESS=1 the page is written anew.

Each snapshot of the tracker is compared with memtrace's answer for the program by itself, at the mark of the
same number, type by type. So is the tracker's peak, after as many allocations and frees since the last
snapshot as in the run under the tracker. These differences are accepted:

- reduction: the tracker looks at the gradients of whole parameters just before its snapshot "Before
  Post-Backward". memtrace recognizes them a moment later, when FSDP reduces them, and counts them as `Temp`
  until then. REDUCTIONS has the number of these snapshots.
- start: before the first call of the model, memtrace does not know its parameters.
- other: the tracker calls inputs `Inputs` and sees no workspace. memtrace counts both as `Other`.
"""

import csv
import json
import os
import pathlib
import re
import subprocess
import sys

MEMTRACE, PAGE, *RUNS = map(pathlib.Path, sys.argv[1:])
# By the tracker's type: memtrace's type.
TYPES = {
    "Sharded Param": "Parameter",
    "Unsharded Param": "Unsharded Param",
    "Buffer": "Buffer",
    "Sharded Grad": "Gradient",
    "Unsharded Grad": "Unsharded Grad",
    "Activation": "Activation",
    "Temp": "Temp",
    "All Gather": "All Gather",
    "Reduce Scatter": "Reduce Scatter",
    "OptState": "Optstate",
}
# By model: the number of snapshots with the difference "reduction".
REDUCTIONS = {"transformer": 8, "half": 8, "convolutions": 6}


def types_at(trace, moment=None):
    """Returns the bytes of each of the tracker's types at a moment, at the peak if none is given."""
    options = ["--mem-tracker", "--rounded", "--json", *(["--at", moment] if moment else [])]
    done = subprocess.run([MEMTRACE, "peak", *options, trace], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (moment, done.stderr)
    (found,) = [each for each in json.loads(done.stdout)["devices"] if each["device"] == 0]
    return {theirs: found.get(ours, 0) for theirs, ours in TYPES.items()}


def compare(where, ours, theirs):
    """Returns True if each type is equal, and False if the only difference is "reduction"."""
    theirs = {name: theirs.get(name, 0) for name in TYPES}
    if ours == theirs:
        return True
    different = {name for name in TYPES if ours[name] != theirs[name]}
    assert different == {"Temp", "Unsharded Grad"}, (where, ours, theirs)
    assert sum(ours.values()) == sum(theirs.values()), (where, ours, theirs)
    assert where[-1].endswith(": Before Post-Backward") and ours["Unsharded Grad"] == 0, (where, ours, theirs)
    return False


def memory_events(trace):
    """Yields each allocation and free on the GPU, and each mark: the name of the mark or `""`, the time and
    the bytes."""
    with trace.open() as lines:
        for row in csv.DictReader(lines):
            if row["event"] == "mark":
                yield row["name"], row["ts_ns"], 0
            elif row["event"] in ("alloc", "free") and row["device"] == "0":
                yield "", row["ts_ns"], int(row["delta_bytes"])


def moment_of_peak(alone, tracked):
    """Returns the time in the trace `alone` at which the tracker found its peak in the trace `tracked`."""
    snapshot, since, found = "", [], None
    for mark, _, size in memory_events(tracked):
        if mark == "peak":
            found = snapshot, list(since)
        elif mark:
            snapshot, since = mark, []
        else:
            since.append(size)
    at, before = found
    since = None
    for mark, time, size in memory_events(alone):
        if mark:
            since = [] if mark == at else None
        elif since is not None:
            since.append(size)
            if since == before:
                return f"{time}ns"
    raise AssertionError((at, before))


def results():
    """Compares all runs. Returns the name, the peak and the number of equal snapshots of each model."""
    rows = []
    for run in RUNS:
        tools = {}
        for line in (run / "answers").read_text().splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                assert "error" not in found, found
                tools.setdefault(found["model"], {})[found["tool"]] = found
        assert list(tools) == list(REDUCTIONS), list(tools)
        for model, runs in tools.items():
            traces = [next((run / "trace").glob(f"*.{each['pid']}.csv")) for each in runs.values()]
            rows.append(result(model, *traces, *runs.values()))
    return rows


def highest(trace):
    """Returns the most memory that was allocated on the GPU."""
    with trace.open() as lines:
        return max(int(row["allocated_bytes"]) for row in csv.DictReader(lines) if row["device"] == "0")


def result(model, trace, tracked_trace, alone, tracked):
    wanted = tracked["snapshots"]
    assert len(wanted) == len(alone["snapshots"]) > 40, (model, len(wanted))
    assert [each.get("of") for each in wanted] == [each.get("of") for each in alone["snapshots"]]
    equal = 0
    for number, snapshot in enumerate(wanted):
        where = (model, tracked["ranks"], number, snapshot.get("of"))
        # The first snapshot is taken before the first call of the model.
        if number > 0:
            equal += compare(where, types_at(trace, f"mark:snapshot {number}"), snapshot["types"])
    reductions = len(wanted) - 1 - equal
    assert reductions == REDUCTIONS[model], (model, tracked["ranks"], reductions)
    peak = types_at(trace, moment_of_peak(trace, tracked_trace))
    assert compare((model, tracked["ranks"], "peak"), peak, tracked["peak"])
    assert highest(trace) == alone["max_allocated"], (model, highest(trace), alone["max_allocated"])
    return f"`{model}`, {tracked['ranks']} ranks", peak, f"{equal} of {len(wanted) - 1}"


def table_of(rows):
    lines = [f"| model | {' | '.join(TYPES)} | equal snapshots |"]
    lines.append(f"| --- | {' | '.join(['---:'] * len(TYPES))} | --- |")
    for name, peak, equal in rows:
        cells = " | ".join(f"{peak[kind]:,}" for kind in TYPES)
        lines.append(f"| {name} | {cells} | {equal} |")
    return "\n".join(lines)


def hold(rows):
    page = PAGE.read_text()
    table = table_of(rows)
    new = re.sub(
        r"(<!-- fsdp -->\n).*?(<!-- /fsdp -->)", lambda m: m[1] + table + "\n" + m[2], page, flags=re.S
    )
    if os.environ.get("MEMTRACE_BLESS") == "1":
        PAGE.write_text(new)
    assert new == page or os.environ.get("MEMTRACE_BLESS") == "1", f"MEMTRACE_BLESS=1 writes {PAGE}:\n{table}"


hold(results())
