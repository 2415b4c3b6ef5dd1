"""Trains under a limit of PyTorch: limits.py FRACTION [fix]."""

import os
import sys

import torch
from torch import nn

if "fix" not in sys.argv:
    torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(os.environ.get("STEPS", 4))):
    loss = model(torch.randn(4096, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
