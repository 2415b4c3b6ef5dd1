"""Keeps memory of each step, in a way (the argument) in which the search finds no holder.

Several arguments run as forked.py says.
"""

import copy
import gc
import sys
from pathlib import Path

import memtrace
import numpy
import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked


class Node:
    """An entry of a linked list."""

    def __init__(self, tensor, after):
        self.tensor, self.after = tensor, after


WAY, STEPS = forked.each(sys.argv[1:]), 8
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
array = numpy.empty(STEPS, dtype=object)
head = None
if WAY == "frozen":
    gc.freeze()
for step in range(STEPS):
    memtrace.step(step)
    loss = model(torch.randn(256, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if WAY == "deepcopy":
        kept.append(copy.deepcopy(model))
    elif WAY == "optimizer":
        optimizer = torch.optim.AdamW(model.parameters())
        kept.append(optimizer)
    elif WAY == "buffer":
        model.register_buffer(f"buffer{step}", torch.zeros(512, 512, device="cuda"))
    elif WAY == "storage":
        kept.append(torch.zeros(512, 512, device="cuda").untyped_storage())
    elif WAY == "array":
        array[step] = torch.zeros(512, 512, device="cuda")
    elif WAY == "module":
        model.add_module(f"part{step}", torch.nn.Linear(512, 512, device="cuda"))
    elif WAY == "dlpack":
        kept.append(torch.utils.dlpack.to_dlpack(torch.zeros(512, 512, device="cuda")))
    elif WAY == "frozen":
        kept.append(torch.zeros(512, 512, device="cuda"))
    elif WAY == "linked":
        head = Node(torch.zeros(512, 512, device="cuda"), head)
    del loss
memtrace.step(STEPS)
memtrace.retained()
