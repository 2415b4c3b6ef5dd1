"""Compares the owners in a trace with the sums that its script computed from its tensors.

    owner_totals.py TRACE CHECKPOINTS

At each checkpoint the bytes of parameters, buffers, gradients and optimizer state must be equal per module.
At the peak at least 99 % of the bytes must have a module, a phase, an op and a category.
"""

import collections
import csv
import json
import re
import sys

OWNED = ("parameter", "buffer", "gradient", "optimizer_state")
INTEGERS = ("device", "addr", "delta_bytes", "rounded_bytes", "allocated_bytes", "alloc_id", "step", "seq")


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for column in INTEGERS:
                row[column] = int(row[column])
            yield row


def replay(path):
    """Yields every row with the live blocks after it, by address; each block is represented by its last alloc
    or tag row."""
    live = {}
    for row in rows(path):
        if row["device"] >= 0:
            if row["event"] == "alloc" or (row["event"] == "tag" and row["delta_bytes"] > 0):
                live[row["addr"]] = row
            elif row["event"] == "free":
                live.pop(row["addr"], None)
        yield row, live


def eventual(path):
    """Returns the last alloc or tag row of each block, which has its final category."""
    last = {}
    for row in rows(path):
        if row["event"] == "alloc" or (row["event"] == "tag" and row["delta_bytes"] > 0):
            last[row["alloc_id"]] = row
    return last


def compare(checkpoint, live, differences, where):
    """Compares the bytes by (category, module) in the trace with the script's. Returns the number of sums."""
    ours, theirs = collections.Counter(), collections.Counter()
    for row in live.values():
        if row["category"] in OWNED:
            ours[row["category"], row["module"]] += row["rounded_bytes"]
    for _, category, path, size in checkpoint["tensors"]:
        theirs[category, path] += size
    for key in sorted(ours | theirs):
        if ours[key] != theirs[key]:
            differences.append(f"{where}: {key}: {ours[key]} in the trace, {theirs[key]} in torch")
    return len(ours | theirs)


def main():
    trace, checkpoints = sys.argv[1:]
    with open(checkpoints, encoding="utf-8") as file:
        checkpoints = {line["checkpoint"]: line for line in map(json.loads, file)}
    differences, compared, met = [], 0, set()
    peak, at_peak = 0, {}
    for row, live in replay(trace):
        mark = re.fullmatch(r"checkpoint:(\d+)", row["name"]) if row["event"] == "mark" else None
        if mark:
            line = checkpoints[int(mark[1])]
            met.add(int(mark[1]))
            compared += compare(line, live, differences, f"checkpoint {mark[1]} ({line['label']})")
        if row["event"] == "alloc" and row["allocated_bytes"] > peak:
            peak, at_peak = row["allocated_bytes"], dict(live)
    if met != set(checkpoints):
        differences.append(f"checkpoints {sorted(set(checkpoints) - met)} have no mark")
    known = eventual(trace)
    held = [(row, known[row["alloc_id"]]["category"]) for row in at_peak.values()]
    total = sum(row["delta_bytes"] for row, _ in held)
    shares = {}
    for column in ("module", "phase", "op", "category"):
        owned = [category if column == "category" else row[column] for row, category in held]
        without = [row for (row, _), name in zip(held, owned) if name in ("(none)", "script")]
        shares[column] = 1 - sum(row["delta_bytes"] for row in without) / total
        if shares[column] < 0.99:
            for row, category in sorted(without, key=lambda r: -r[0]["delta_bytes"])[:5]:
                owner = {c: row[c] for c in ("delta_bytes", "op", "module", "phase", "step", "seq")}
                differences.append(f"at the peak, no {column}: {owner} {category}")
    for difference in differences[:20]:
        print(difference)
    percent = ", ".join(f"{column} {100 * share:.2f} %" for column, share in shares.items())
    print(
        f"{len(met)} checkpoints, {compared} sums, {len(differences)} differences; "
        f"of {total} bytes at the peak: {percent}"
    )
    sys.exit(1 if differences or not met else 0)


if __name__ == "__main__":
    main()
