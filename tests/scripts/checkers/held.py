"""Compares the live bytes by category at the mark `checkpoint:0` with those that the script printed.

held.py TRACE EXPECTED     EXPECTED is JSON: bytes by category
"""

import collections
import csv
import json
import sys

trace, expected = sys.argv[1], json.loads(sys.argv[2])
live = collections.Counter()
is_met = False
with open(trace, newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        if row["event"] == "mark" and row["name"] == "checkpoint:0":
            is_met = True
            break
        if row["event"] in ("alloc", "free", "tag", "live") and int(row["device"]) >= 0:
            sign = 1 if int(row["delta_bytes"]) > 0 else -1
            live[row["category"]] += sign * int(row["rounded_bytes"])
assert is_met, "the trace has no checkpoint"
different = {name: (live[name], wanted) for name, wanted in expected.items() if live[name] != wanted}
assert not different, f"(in the trace, in torch): {different}; all: {dict(live)}"
print(f"{len(expected)} categories are equal: {dict(live)}")
