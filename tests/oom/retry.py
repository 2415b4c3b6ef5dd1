"""Catches an OOM and tries again with half the batch: retry.py BATCH [fix]."""

import os
import sys

import torch
from torch import nn

model = nn.Sequential(
    *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8))
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = int(sys.argv[1])


def train(rows):
    hidden = torch.randn(rows, 1024, device="cuda")
    activations = [hidden]
    for block in model:
        hidden = block(hidden)
        activations.append(hidden)
    loss = sum(a.square().mean() for a in activations)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(int(os.environ.get("STEPS", 4))):
    if "fix" not in sys.argv:
        try:
            train(batch)
        except torch.OutOfMemoryError as e:
            print(type(e).__name__, "again with half the batch")
            batch //= 2
            train(batch)
    else:
        failed = False
        try:
            train(batch)
        except torch.OutOfMemoryError:
            failed = True
        if failed:
            batch //= 2
            train(batch)
