"""Compares the blocks of a trace with the owners that `owner_cases.py` expects.

    expected_owners.py FOLDER

FOLDER has `CASE.PID.json` and, below `trace`, `*.PID.csv`. A block is identified by its size. Of several
blocks of one size the last counts, or, with `some`, any one. The category is the block's final one. `callers`
are functions of `owner_cases.py` in the stack, innermost first. They are compared only if the stacks of ops
have Python lines.
"""

import csv
import json
import re
import sys
from pathlib import Path

from owner_totals import rows


def stacks(path):
    """Returns the functions of `owner_cases.py` by `stack_id`, innermost first; empty without lines."""
    file = path.with_suffix(".stacks")
    if not file.exists():
        return {}
    with open(file, newline="", encoding="utf-8") as lines:
        frames = {int(row["stack_id"]): row for row in csv.DictReader(lines)}
    # Without MEMTRACE_STACKS=python, only memory without an op and first uses of a device have Python lines.
    below_lines = {0: False}
    for number in sorted(frames):  # a parent has a smaller number than its children
        frame = frames[number]
        below_lines[number] = below_lines[int(frame["parent_id"])] or frame["kind"] == "python"
    if not any(below_lines[number] for number, frame in frames.items() if frame["kind"] == "op"):
        return {}
    callers = {0: []}
    for number in sorted(frames):
        line = re.search(r"owner_cases\.py:\d+ (.*)", frames[number]["frame"])
        around = callers[int(frames[number]["parent_id"])]
        callers[number] = [line[1], *around] if line and frames[number]["kind"] == "python" else around
    return callers


def blocks(path):
    """Returns each block: its first row, its last category and owner, and the last mark before it."""
    found, mark, callers = {}, "", stacks(path)
    for row in rows(path):
        if row["event"] == "mark" and row["api"] != "model_fact":
            mark = row["name"]
        elif row["event"] == "alloc":
            found[row["alloc_id"]] = {
                **row,
                "mark": mark,
                "eventual": row["category"],
                "owner": row["module"],
                "callers": callers.get(int(row["stack_id"])) if callers else None,
            }
        elif row["event"] == "tag" and row["delta_bytes"] > 0 and row["alloc_id"] in found:
            found[row["alloc_id"]].update(eventual=row["category"], owner=row["module"], phase=row["phase"])
    return list(found.values())


def differs(block, wanted, others):
    """Returns the differences between a block and its expected owner."""
    pairs = []
    for name, value in wanted.items():
        if name == "module":
            pairs.append((name, block["owner"], value))
        elif name == "category":
            pairs.append((name, block["eventual"], value))
        elif name == "phase":
            pairs.append((name, block["phase"], value))
        elif name == "backward_of":
            pairs += [("module", block["owner"], value), ("phase", block["phase"], "backward")]
        elif name == "callers" and block["callers"] is not None:
            pairs.append((name, block["callers"][: len(value)], value))
        elif name == "after":
            pairs.append(("mark", block["mark"], value))
        elif name == "sibling":
            same = {other["owner"] for other in others if other["delta_bytes"] == value * 512}
            pairs.append(("module", {block["owner"]}, same))
    return [f"{name} {found!r}, not {value!r}" for name, found, value in pairs if found != value]


def main():
    folder = Path(sys.argv[1])
    bad = checked = 0
    for file in sorted(folder.glob("*.json")):
        case, pid, _ = file.name.rsplit(".", 2)
        traces = list(folder.glob(f"trace/*.{pid}.csv"))
        if len(traces) != 1:
            print(f"{case}: {len(traces)} traces")
            bad += 1
            continue
        found = blocks(traces[0])
        for wanted in json.loads(file.read_text()):
            checked += 1
            of_size = [block for block in found if block["delta_bytes"] == wanted["bytes"]]
            several = "some" in wanted or "after" in wanted
            tried = [differs(block, wanted, found) for block in (of_size if several else of_size[-1:])]
            if not tried or all(tried):
                bad += 1
                count = wanted["bytes"] // 512
                print(f"{case}: block of {count}: {min(tried, key=len) if tried else 'is not there'}")
    print(f"{checked} owners checked, {bad} wrong")
    sys.exit(1 if bad or not checked else 0)


if __name__ == "__main__":
    main()
