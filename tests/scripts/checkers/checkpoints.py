"""Records torch's own figures of its memory while a script runs.

`checkpoint()` leaves the NVTX mark `checkpoint:N` in the trace and, at the same moment, one JSON line in
the file that MEMTRACE_TEST_CHECKPOINTS names: `torch.cuda.memory_stats()` of each device, and each block
and segment of `torch.cuda.memory_snapshot()`. `verify.py` compares the trace with them.
"""

import itertools
import json
import os

import torch

_numbers = itertools.count()


def checkpoint(label, **more):
    """Records the figures. `more` is added to the line unchanged, for `verify.py`."""
    number = next(_numbers)
    torch.cuda.nvtx.mark(f"checkpoint:{number}")
    path = os.environ.get("MEMTRACE_TEST_CHECKPOINTS")
    if not path:
        return
    segments = torch.cuda.memory_snapshot()
    line = {"checkpoint": number, "label": label, "torch": torch.__version__, **more}
    line["devices"] = [dict(torch.cuda.memory_stats(d)) for d in range(torch.cuda.device_count())]
    line["segments"] = [
        [s["device"], s["address"], s["total_size"], s["stream"], s["segment_pool_id"] != (0, 0)]
        for s in segments
    ]
    line["pools"] = [
        [s["device"], address, list(s["segment_pool_id"])]
        for s in segments
        for address, b in _placed(s)
        if b["state"] == "active_allocated" and s["segment_pool_id"] != (0, 0)
    ]
    line["blocks"] = [
        [s["device"], address, b["size"], b["requested_size"], b["state"], s["stream"]]
        for s in segments
        for address, b in _placed(s)
        if b["state"] != "inactive"
    ]
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def _placed(segment):
    """Yields the blocks of a segment with their addresses, which old snapshots omit."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]
