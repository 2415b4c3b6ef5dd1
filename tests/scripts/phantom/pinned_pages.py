"""Pins 64 MiB without a write to them, and 1 TiB, for which no machine of the tests has room.

Prints by how many MiB the resident memory of the process grows.
"""

import os

import torch

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


torch.zeros(1, device="cuda")
warm = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
for mib in (64, 1 << 20):
    before = resident()
    pinned = torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=True)
    print((resident() - before) // MIB)
