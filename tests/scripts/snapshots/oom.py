"""Runs out of memory. An OOM observer writes the snapshot to the file in argv[1]."""

import os
import sys

import torch


def observer(device, alloc, device_alloc, device_free):
    torch.cuda.memory._dump_snapshot(sys.argv[1])
    # End here, so that the trace ends where the snapshot does.
    os._exit(0)


def fill():
    kept = []
    for number in range(1000):
        kept.append(torch.empty((1 << 29) + number * 100, device="cuda"))
        shortlived = torch.empty(3_000_000 + number * 50_000, device="cuda")
        del shortlived


torch.cuda.memory._record_memory_history()
torch._C._cuda_attach_out_of_memory_observer(observer)
fill()
