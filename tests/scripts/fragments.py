"""Leaves eight 20 MiB segments with one 2 MiB block in each: 144 MiB free, no piece above 18 MiB."""

import torch
from torch.cuda import nvtx

MIB = 1 << 20


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


with nvtx.range("step:0"):
    with nvtx.range("module:Pins.small"):
        pins, rest = [], []
        for _ in range(8):
            # 2 MiB takes a new segment of 20 MiB and two of 9 MiB fill it.
            pins.append(block(2))
            rest += [block(9), block(9)]
    del rest
with nvtx.range("step:1"):
    with nvtx.range("module:Wants.big"):
        big = block(64)
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
