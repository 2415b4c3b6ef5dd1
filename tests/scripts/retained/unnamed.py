"""Keeps memory of each step in a way that the argument names, where the search finds no holder."""

import copy
import sys

import memtrace
import numpy
import torch

WAY, STEPS = sys.argv[1], 8
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
array = numpy.empty(STEPS, dtype=object)
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
    del loss
memtrace.step(STEPS)
memtrace.retained()
