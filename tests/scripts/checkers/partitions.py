"""Checks the categories of a run of ../seeds/partitions.py against arithmetic.

    partitions.py TRACE ANSWERS

At the mark `last`, the requested bytes of each category equal those that the program computed, and all
blocks together equal `torch.cuda.memory_allocated()`. Every large block has a use. `bucket` is the size of a
bucket of gradients, and `gathered` the bytes that a forward gathers for each layer.
"""

import csv
import json
import pathlib
import sys
from collections import Counter

TRACE, ANSWERS = map(pathlib.Path, sys.argv[1:])
USES = ("parameter", "gradient", "optimizer_state")
# Smaller blocks are not compared, such as the map of unused parameters that DDP reduces.
LEAST = 1000


def rows_until_last(path, device):
    with path.open() as lines:
        for row in csv.DictReader(lines):
            if row["event"] == "mark" and row["name"] == "last":
                return
            if row["event"] in ("alloc", "free", "tag") and row["device"] == device:
                yield row


def check(answer):
    (path,) = TRACE.glob(f"*.{answer['pid']}.csv")
    device = path.name.split(".")[1].removeprefix("r")
    live, buckets, gathered, allocated = {}, set(), {}, 0
    for row in rows_until_last(path, device):
        block = row["alloc_id"]
        allocated = int(row["allocated_bytes"])
        if row["event"] == "free":
            live.pop(block, None)
        elif int(row["delta_bytes"]) > 0:
            size = int(row["requested_bytes"]) if row["event"] == "alloc" else live[block][1]
            live[block] = row["category"], size, row["module"]
            if row["name"] == "bucket" and row["category"] == "gradient":
                buckets.add(size)
            if row["category"] == "unsharded_param" and row["phase"] == "forward":
                gathered[block] = row["step"], row["module"], size
    where = answer["case"], path.name
    assert allocated == answer["allocated"], (where, allocated, answer["allocated"])
    expected = dict(answer["expected"])
    if "bucket" in expected:
        assert expected.pop("bucket") in buckets, (where, buckets)
    if "gathered" in expected:
        layers = Counter()
        for step, module, size in gathered.values():
            layers[step, module] += size
        of_layer = expected.pop("gathered")
        # Until the first call has ended, DeepSpeed does not know the order of the layers.
        steps = {step for step, _ in layers} - {"0"}
        assert layers and len(steps) > 3
        modules = [f"DeepSpeedEngine.{layer}.0" for layer in range(6)]
        for step in steps:
            assert [layers[step, module] for module in modules] == [of_layer] * 6, (where, step, layers)
    found = dict.fromkeys(USES, 0)
    for category, size, module in live.values():
        if size < LEAST:
            continue
        if category in found:
            found[category] += size
        else:
            assert category in ("workspace", "script"), (where, category, size, module)
    assert found == expected, (where, found, expected)
    print(where, found)


answers = [
    json.loads(line[line.index("{") :]) for line in ANSWERS.read_text().splitlines() if '{"case"' in line
]
assert len(answers) == 2, answers
for each in answers:
    check(each)
