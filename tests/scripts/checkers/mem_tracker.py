"""Compares a trace with MemTracker's totals at every module boundary.

    mem_tracker.py TRACE TRACKER MODULES

MODULES is the answer of `memtrace modules --json --rounded`. It must have as many forwards of each module,
and as many recomputed ones (`Pre-Forward-AC`, `Post-Forward-AC`), as MemTracker counted, with the same bytes
in each category.

The bytes of each category must be equal wherever MemTracker is right. Only these differences are accepted:

- workspaces: memory that a library keeps and no op returns. MemTracker sees none; at most WORKSPACES.
- hooks: at a boundary inside backward, MemTracker counts a gradient as `Gradient` only once its hook ran; the
  trace counts it from its birth, by its final category. The sum of `Gradient` and `Temp` is equal.
- inputs: MemTracker counts them as `Activation`, because it has no category for them.
- transients: memory that an op allocates and frees before it returns. MemTracker's peak lacks the transients
  of ATen's ops, so the trace's peak is higher: at most by the transients that were live at once and the
  workspaces.
- names: MemTracker names a shared module after its last path, the trace after its first; a module made in a
  forward is a root to MemTracker.
"""

import collections
import json
import re
import sys

from owner_totals import eventual, replay, rows

KINDS = {
    "parameter": "Parameter",
    "buffer": "Buffer",
    "optimizer_state": "Optstate",
    "activation": "Activation",
    "input": "Activation",
    "(none)": "Activation",
    "script": "Activation",
    "temporary": "Temp",
    "gradient": "Gradient",
}
NAMES = {
    "Autoencoder.again.0": "Autoencoder.middle",
    "CrossEntropyLoss": "BertForSequenceClassification.CrossEntropyLoss",
}
# The largest sum of workspaces: `CUBLAS_WORKSPACE_CONFIG=:16:8` makes them 128 KiB per handle, and each of
# the two threads that multiply has a handle.
WORKSPACES = 2 * 131072


# The categories of the report's states, grouped so that they are comparable (see hooks and inputs above).
KINDS_OF_STATES = [["Parameter"], ["Buffer"], ["Optstate"], ["Gradient", "Temp"], ["Activation", "Other"]]


def workspaces(trace):
    inside, freed = False, set()
    for row in rows(trace):
        if row["event"] == "mark":
            inside = {"workspaces:begin": True, "workspaces:end": False}.get(row["name"], inside)
        elif inside and row["event"] == "free":
            freed.add(row["alloc_id"])
    return freed


def transients(trace):
    """Returns the ids of blocks that were allocated and freed while one op ran."""
    born, waiting, short = {}, {}, set()  # waiting: by thread, the birth and id of each freed block
    for row in rows(trace):
        if row["device"] < 0:
            continue
        now, thread = int(row["ts_ns"]), row["tid"]
        if row["event"] == "alloc":
            born[row["alloc_id"]] = (now, thread)
        elif row["event"] == "free" and born.get(row["alloc_id"], (0, None))[1] == thread:
            waiting.setdefault(thread, []).append((born[row["alloc_id"]][0], row["alloc_id"]))
        elif row["event"] == "op":
            began = now - int(row["latency_ns"])
            short |= {block for birth, block in waiting.pop(thread, []) if birth >= began}
    return short


def compare_calls(snapshots, report, differences):
    """Compares the number of calls of each module, and the memory before and after each forward."""
    states, theirs = {}, collections.defaultdict(list)
    with open(report, encoding="utf-8") as file:
        (process,) = json.load(file)["processes"]
    for module in process["modules"]:
        for state, calls in module["states"].items():
            if "Forward" in state and "Peak" not in state:
                states[state, module["module"]] = calls
    for line in snapshots.values():
        boundary = re.fullmatch("(before|after) forward of (.*)", line["label"])
        if boundary:
            state = {"before": "Pre-Forward", "after": "Post-Forward"}[boundary[1]]
            name = NAMES.get(boundary[2], boundary[2])
            theirs[state + ("-AC" if line["in_backward"] else ""), name].append(line["totals"])
    compared = 0
    for key in sorted(states.keys() | theirs.keys()):
        calls, totals = states.get(key, []), theirs[key]
        if len(calls) != len(totals):
            differences.append(f"{key}: {len(calls)} times in the report, {len(totals)} by MemTracker")
            continue
        for number, (call, total) in enumerate(zip(calls, totals, strict=True)):
            compared += 1
            for kinds in KINDS_OF_STATES:
                ours = sum(call.get("cuda:0", {}).get(kind, 0) for kind in kinds)
                wanted = sum(total.get(kind, 0) for kind in kinds)
                # Depending on the pass in which a library took it, a workspace counts as `Activation` or
                # `Temp`, which are the lists of several kinds here.
                most = WORKSPACES if len(kinds) > 1 else 0
                if not 0 <= ours - wanted <= most:
                    differences.append(
                        f"{key} {number}: {kinds}: {ours} in the report, {wanted} by MemTracker"
                    )
    return compared


def main():
    trace, tracker, report = sys.argv[1:]
    with open(tracker, encoding="utf-8") as file:
        *lines, last = map(json.loads, file)
    snapshots = {line["number"]: line for line in lines}
    of_libraries, known, short = workspaces(trace), eventual(trace), transients(trace)
    met, equal, kept, differences = 0, 0, 0, []
    peak, true_peak, most_short = 0, 0, 0
    for row, live in replay(trace):
        if row["event"] == "alloc" and row["device"] >= 0:
            passing = sum(block["delta_bytes"] for block in live.values() if block["alloc_id"] in short)
            most_short = max(most_short, passing)
            held = sum(
                block["rounded_bytes"]
                for block in live.values()
                if block["alloc_id"] not in short and block["alloc_id"] not in of_libraries
            )
            peak, true_peak = max(peak, held), max(true_peak, row["allocated_bytes"])
        mark = re.fullmatch(r"tracker:(\d+)", row["name"]) if row["event"] == "mark" else None
        if not mark:
            continue
        line = snapshots[int(mark[1])]
        met += 1
        ours, theirs = collections.Counter(), collections.Counter()
        apart = {"Temp": "Gradient or Temp", "Gradient": "Gradient or Temp"} if line["in_backward"] else {}
        for block in live.values():
            if block["alloc_id"] not in of_libraries:
                last_row = known[block["alloc_id"]]
                kind = KINDS[last_row["category"]]
                if kind == "Temp" and last_row["phase"] == "optimizer":
                    # MemTracker counts all memory of an optimizer's step as its state.
                    kind = "Optstate"
                ours[apart.get(kind, kind)] += block["rounded_bytes"]
        kept = max(
            kept, sum(block["delta_bytes"] for block in live.values() if block["alloc_id"] in of_libraries)
        )
        for kind, size in line["totals"].items():
            if kind != "Total":
                theirs[apart.get(kind, kind)] += size
        for kind in sorted(set(ours) | set(theirs)):
            if ours[kind] == theirs[kind]:
                equal += 1
            else:
                differences.append(
                    f"{mark[1]} ({line['label']}): {kind}: {ours[kind]} in the trace, "
                    f"{theirs[kind]} by MemTracker"
                )
    if met != len(snapshots):
        differences.append(f"{len(snapshots) - met} snapshots have no mark")
    states = compare_calls(snapshots, report, differences)
    if kept > WORKSPACES:
        differences.append(f"{kept} bytes of workspaces")
    if not peak <= last["peak"] <= true_peak <= last["peak"] + kept + most_short:
        differences.append("the peaks differ by more than that")
    for difference in differences[:20]:
        print(difference)
    print(
        f"{met} boundaries, {equal} totals equal, {states} states of modules, {len(differences)} differ; "
        f"workspaces up to {kept} bytes; "
        f"peak {last['peak']} by MemTracker, {peak} without and {true_peak} with workspaces and transients, "
        f"of these up to {most_short} at once"
    )
    sys.exit(1 if differences or not met else 0)


if __name__ == "__main__":
    main()
