"""Trains a model whose objects Python frees when the program ends. Prints the allocated memory after each
step and at the end.

last_line.py [uncollected]     without Python's garbage collector
"""

import atexit
import gc
import sys

import torch
from torch import nn


# Registered before the first use of the GPU, so this runs after memtrace's own exit functions.
@atexit.register
def last():
    if "uncollected" not in sys.argv:
        kept.clear()
    print(torch.cuda.memory_allocated())


if "uncollected" in sys.argv:
    gc.disable()
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
optimizer = torch.optim.Adam(model.parameters())
kept = []
for _ in range(3):
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(torch.cuda.memory_allocated())
    # This allocation belongs to the next step.
    kept.append(torch.ones(1 << 20, device="cuda"))
