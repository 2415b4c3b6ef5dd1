"""Compares `memtrace ops --actions --each --json` with torch.profiler's memory profile of the same step.

profiled_timeline.py OURS THEIRS

Each storage has the same actions in the same order, and the same category wherever the profiler has one.
Only these differences are accepted:

- sizes: for blocks from before the profile, the profiler has the tensor's own bytes, and the trace the
  block's: at most the next multiple of 512.
- unidentified: a block on which no tensor was seen (scratch of an op, a library's workspace) has no address
  in the profile. For each size and action, the trace has as many of them.
- untouched: blocks from before the profile that no op used are only in the trace.
- unknown: where the profiler has no category, the trace has the category of its rows.
"""

import collections
import json
import sys


def by_address(rows):
    sequences = collections.defaultdict(list)
    for row in rows:
        sequences[row["addr"]].append(row)
    return sequences


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        ours = by_address(json.load(file)["processes"][0]["devices"][0]["actions"])
    with open(sys.argv[2], encoding="utf-8") as file:
        theirs = by_address(json.load(file))
    unidentified = collections.Counter((row["action"], row["bytes"]) for row in theirs.pop(0, []))
    counts, wrong = collections.Counter(), []
    for address in sorted(set(ours) | set(theirs)):
        rows, left = ours[address], collections.deque(theirs.get(address, []))
        for row in rows:
            match = left[0] if left else None
            # If the category differs, a block that the profiler could not identify is taken instead: it may
            # come before an identified one of the same action and size.
            known = match and match["category"] in (row["category"], "Unknown")
            if not known and unidentified[row["action"], row["bytes"]] > 0:
                match = None
            if (
                match
                and (row["action"], row["version"]) == (match["action"], match["version"])
                and (
                    row["bytes"] == match["bytes"]
                    or row["alloc_id"] in before(rows)
                    and match["bytes"] <= row["bytes"] <= -(-match["bytes"] // 512) * 512
                )
            ):
                left.popleft()
                counts["actions"] += 1
                for key in ("category", "category_after"):
                    if match[key] == "Unknown":
                        counts["unknown"] += 1
                    elif match[key] == row[key]:
                        counts[match[key]] += 1
                    else:
                        wrong.append(
                            f"{address:#x} {row['action']}: {row[key]}, {match[key]} by the profiler"
                        )
            elif unidentified[row["action"], row["bytes"]] > 0:
                unidentified[row["action"], row["bytes"]] -= 1
                counts["unidentified"] += 1
            elif row["action"] == "PREEXISTING" and address not in theirs:
                counts["untouched"] += 1
            else:
                wrong.append(
                    f"{address:#x}: {row['action']} version {row['version']} of {row['bytes']} bytes "
                    f"is not in the profile"
                )
        wrong += [
            f"{address:#x}: {row['action']} version {row['version']} of {row['bytes']} bytes by the profiler "
            f"is not in the trace"
            for row in left
        ]
    wrong += [
        f"{count} x {action} of {size} bytes without address are not in the trace"
        for (action, size), count in unidentified.items()
        if count
    ]
    for line in wrong[:20]:
        print(line)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())), f"; {len(wrong)} wrong")
    categories = {
        "PARAMETER",
        "OPTIMIZER_STATE",
        "INPUT",
        "TEMPORARY",
        "ACTIVATION",
        "GRADIENT",
        "AUTOGRAD_DETAIL",
    }
    missing = categories - set(counts)
    if missing:
        print(f"nothing was {', '.join(sorted(missing))}: the script tests too little")
    sys.exit(1 if wrong or missing or counts["actions"] < 100 else 0)


def before(rows):
    """Returns the ids of blocks from before the profile."""
    return {row["alloc_id"] for row in rows if row["action"] == "PREEXISTING"}


if __name__ == "__main__":
    main()
