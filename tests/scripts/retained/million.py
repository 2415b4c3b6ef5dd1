"""Searches a heap of a million objects for what holds the tensors of six steps."""

import memtrace
import torch

heap = [[number] for number in range(1_000_000)]
kept = []
for step in range(6):
    memtrace.step(step)
    kept.append(torch.ones(1 << 18, device="cuda"))
memtrace.retained()
print("done")
