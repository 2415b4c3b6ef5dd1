"""Trains a small model on the CPU for eight steps."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8):
    x = torch.randn(32, 64)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
