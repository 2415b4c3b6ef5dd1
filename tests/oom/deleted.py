"""Deletes models whose optimizers stay: deleted.py sweep|heads [fix]."""

import gc
import os
import sys

import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 3))


def mlp(width, layers):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()


def step(model, optimizer, width):
    model(torch.randn(256, width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sweep():
    """Trains two models, one after the other, and keeps the optimizer of each with its results."""
    results = {}
    for width in (2048, 2560):
        model = mlp(width, 12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(STEPS):
            step(model, optimizer, width)
        results[width] = {"lr": 1e-4} if FIX else {"lr": 1e-4, "optimizer": optimizer}
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()


def heads():
    """Gives one optimizer the parameters of a new head in each round. The old heads are never removed."""
    body = mlp(1024, 8)
    optimizer = torch.optim.Adam(body.parameters(), lr=1e-4)
    for _ in range(STEPS):
        head = mlp(1024, 6)
        if FIX:
            for group in optimizer.param_groups[1:]:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
            del optimizer.param_groups[1:]
        optimizer.add_param_group({"params": head.parameters()})
        for _ in range(4):
            step(nn.Sequential(body, head), optimizer, 1024)


{"sweep": sweep, "heads": heads}[KIND]()
