"""Compares the live bytes by category at the marks `checkpoint:N` with the bytes that the script printed.

held.py TRACE EXPECTED     EXPECTED is JSON, a line for each mark: bytes by category
"""

import collections
import csv
import json
import sys

trace, expected = sys.argv[1], [json.loads(line) for line in sys.argv[2].splitlines()]
live = collections.Counter()
met = 0
with open(trace, newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        if row["event"] == "mark" and row["name"] == f"checkpoint:{met}":
            wanted = expected[met]
            different = {name: (live[name], size) for name, size in wanted.items() if live[name] != size}
            assert not different, f"{met}: (in the trace, in torch): {different}; all: {dict(live)}"
            print(f"{len(wanted)} categories are equal: {dict(live)}")
            met += 1
        elif row["event"] in ("alloc", "free", "tag", "live", "brief") and int(row["device"]) >= 0:
            sign = 1 if int(row["delta_bytes"]) > 0 else -1
            live[row["category"]] += sign * int(row["rounded_bytes"])
assert met == len(expected), f"the trace has {met} of {len(expected)} checkpoints"
