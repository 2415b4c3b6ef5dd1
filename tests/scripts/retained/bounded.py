"""Keeps tensors in a window of five steps and in a table filled in three steps, which do not grow, and in a
list that grows."""

import collections
import sys

import memtrace
import torch

table, window, everything = {}, collections.deque(maxlen=5), []
for step in range(100):
    memtrace.step(step)
    if step < 3:
        table[step] = torch.ones(1 << 18, device="cuda")
    window.append(torch.ones(1 << 18, device="cuda"))
    if step % 10 == 0:
        everything.append(torch.ones(1 << 18, device="cuda"))
for holder in memtrace.retained(everything=True):
    print(holder["name"], holder["verdict"])
# Pretend that there are too many objects to search.
real, sys.getallocatedblocks = sys.getallocatedblocks, lambda: 30_000_000
assert memtrace.retained() == []
sys.getallocatedblocks = real
