"""Trains a small network and keeps memory of every step: leak.py KIND [fix]."""

import os
import sys

import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept, cache = [], {}
total = 0.0

if KIND == "hook":

    def remember(module, inputs, output):
        kept.append(output.detach().mean() if FIX else output.detach())

    model[3].register_forward_hook(remember)


def positions(length):
    if length not in cache:
        cache[length] = torch.randn(length, 1024, device="cuda")
        if FIX and len(cache) > 2:
            del cache[next(iter(cache))]
    return cache[length]


for step in range(int(os.environ.get("STEPS", 40))):
    x = torch.randn(8192, 1024, device="cuda")
    if KIND == "cache":
        x = x[: 4096 + 32 * step] + positions(4096 + 32 * step)
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if KIND == "list":
        kept.append(out.detach().cpu() if FIX else out.detach())
    elif KIND == "graph":
        regular = model[0](x).square().mean()
        total = total + (regular.item() if FIX else regular)
    elif KIND == "best":
        kept.append({name: (w.cpu() if FIX else w.clone()) for name, w in model.state_dict().items()})
    del x, out, loss
