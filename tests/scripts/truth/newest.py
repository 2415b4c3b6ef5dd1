"""Compared with torch: what is new in torch 2.12 to 2.15 and touches memory.

An older torch skips what it lacks.
Writes `snapshot.pickle` into OWNER_OUT, and prints torch's allocated bytes at that moment last.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
from checkpoints import checkpoint

MIB = 1 << 20


def empty(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


# A pool that serves other requests when the device is full.
total = torch.cuda.get_device_properties(0).total_memory
try:
    pool = torch.cuda.MemPool(use_on_oom=True, no_split=True)
except (AttributeError, TypeError):
    print("no pool for an OOM")
else:
    with torch.cuda.use_mem_pool(pool):
        inside = [empty(40 * MIB), empty(5 * MIB), empty(3)]
    checkpoint("in the pool")
    del inside
    checkpoint("pool free")
    free = torch.cuda.mem_get_info()[0]
    rest = [empty(free - 60 * MIB)]
    checkpoint("nearly full")
    try:
        rest.append(empty(30 * MIB))
        rest.append(empty(35 * MIB))
    except torch.OutOfMemoryError:
        print("out of memory beside the pool")
    checkpoint("served by the pool")
    del rest
    checkpoint("rest gone")
    del pool
    torch.cuda.empty_cache()
    checkpoint("pool gone")

# A request that torch refuses before it asks the driver. Settings that are not named get their defaults.
settings = [
    os.environ.get("PYTORCH_ALLOC_CONF", ""),
    "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5",
]
try:
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, settings)))
except (RuntimeError, ValueError, AttributeError):
    print("no early refusal")
else:
    refusals = torch.cuda.memory_stats()["num_oom_rejections"]
    try:
        empty(total // 3 * 2)
    except torch.OutOfMemoryError as error:
        print("refused:", str(error).split(".")[0])
    assert torch.cuda.memory_stats()["num_oom_rejections"] == refusals + 1
    checkpoint("refused")
    torch.cuda.set_per_process_memory_fraction(1.0)

# The names of torch.accelerator are the same memory.
if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "memory"):
    held = empty(7 * MIB)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() > 7 * MIB - 1
    del held
    torch.accelerator.memory.empty_cache()
    checkpoint("emptied by torch.accelerator")

# A snapshot whose events have metadata.
torch.cuda.memory._record_memory_history()
if hasattr(torch.cuda.memory, "_set_memory_metadata"):
    torch.cuda.memory._set_memory_metadata("first part")
held = [empty(2 * MIB), empty(600)]
if hasattr(torch.cuda.memory, "_annotate_tensor"):
    torch.cuda.memory._annotate_tensor(held[0], "a note")
torch.cuda.memory._dump_snapshot(os.path.join(os.environ["OWNER_OUT"], "snapshot.pickle"))
checkpoint("snapshot")
print(torch.cuda.memory_allocated())
