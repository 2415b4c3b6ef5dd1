"""Holds a trace against MemTracker's totals at every boundary: owner_tracker_check.py TRACE TRACKER.

Wherever MemTracker is right, the bytes of each category are the same. What may differ is listed here, and
nothing else:

- workspaces: memory that a library keeps, which no op returned; MemTracker sees none of it.
- hooks: at a boundary inside backward, a gradient is `Gradient` to MemTracker once its hook ran, to the trace
  from its birth (by its eventual category); the sum of `Gradient` and `Temp` is the same.
- inputs: `Activation` to MemTracker, which has no kind for them.
"""

import collections
import json
import re
import sys

from owner_check import eventual, replay, rows

KINDS = {
    "parameter": "Parameter",
    "buffer": "Buffer",
    "optimizer_state": "Optstate",
    "activation": "Activation",
    "input": "Activation",
    "(none)": "Activation",
    "temporary": "Backward",
    "gradient": "Backward",
}


def workspaces(trace):
    inside, freed = False, set()
    for row in rows(trace):
        if row["event"] == "mark":
            inside = {"workspaces:begin": True, "workspaces:end": False}.get(row["name"], inside)
        elif inside and row["event"] == "free":
            freed.add(row["alloc_id"])
    return freed


def main():
    trace, tracker = sys.argv[1:]
    with open(tracker, encoding="utf-8") as file:
        told = {line["number"]: line for line in map(json.loads, file)}
    of_libraries, known = workspaces(trace), eventual(trace)
    met, equal, skipped, differences = 0, 0, 0, []
    for row, live in replay(trace):
        mark = re.fullmatch(r"tracker:(\d+)", row["name"]) if row["event"] == "mark" else None
        if not mark:
            continue
        line = told[int(mark[1])]
        met += 1
        ours, theirs = collections.Counter(), collections.Counter()
        for block in live.values():
            if block["alloc_id"] in of_libraries:
                skipped = max(skipped, block["delta_bytes"])
                continue
            ours[KINDS[known[block["alloc_id"]]["category"]]] += block["rounded_bytes"]
        for kind, size in line["totals"].items():
            if kind != "Total":
                theirs[{"Temp": "Backward", "Gradient": "Backward"}.get(kind, kind)] += size
        for kind in sorted(set(ours) | set(theirs)):
            if ours[kind] == theirs[kind]:
                equal += 1
            else:
                differences.append(f"{mark[1]} ({line['label']}): {kind}: {ours[kind]} in the trace, "
                                   f"{theirs[kind]} by MemTracker")
    if met != len(told):
        differences.append(f"{len(told) - met} snapshots have no mark")
    for difference in differences[:20]:
        print(difference)
    print(f"{met} boundaries, {equal} totals equal, {len(differences)} differ; workspaces up to {skipped} bytes")
    sys.exit(1 if differences or not met else 0)


if __name__ == "__main__":
    main()
