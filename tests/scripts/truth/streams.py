"""Compared with torch: blocks freed while another stream uses them stay active, and are reused later."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
from checkpoints import checkpoint

MIB = 1 << 20


def empty(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


main = torch.cuda.current_stream()
side, other = torch.cuda.Stream(), torch.cuda.Stream()

for size in [1, 513, MIB, 3 * MIB, 30 * MIB + 1]:
    tensor = empty(size)
    tensor.record_stream(side)
    checkpoint("recorded")
    del tensor
    checkpoint("freed, still active")
    # The next allocation queries the events of the side stream.
    filler = empty(size)
    checkpoint("reused")
    del filler

# Two streams hold one block, and several freed blocks wait at once.
waiting = [empty(1000 * (i + 1)) for i in range(10)]
for index, tensor in enumerate(waiting):
    tensor.record_stream(side)
    if index % 2:
        tensor.record_stream(other)
checkpoint("ten recorded")
del tensor
while waiting:
    waiting.pop(len(waiting) // 2)
    checkpoint("one freed")
torch.cuda.synchronize()
checkpoint("synchronized")
kept = empty(5)
checkpoint("asked")

# Blocks allocated on a side stream, used on the main one, freed, and allocated again on both.
with torch.cuda.stream(side):
    blocks = [empty(MIB // 2) for _ in range(5)]
for block in blocks:
    block.record_stream(main)
del block
blocks.clear()
checkpoint("side freed")
torch.cuda.empty_cache()
checkpoint("emptied")
with torch.cuda.stream(other):
    kept = empty(4 * MIB)
checkpoint("other")
# Out of memory on a stream that is not the one of the thread's last allocation.
small = empty(7)
try:
    with torch.cuda.stream(other):
        empty(1 << 45)
except torch.cuda.OutOfMemoryError:
    checkpoint("out of memory", oom_stream=other.cuda_stream)
print("done", torch.cuda.max_memory_allocated())
