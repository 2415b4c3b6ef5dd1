"""Calls a block three times in a row, and a layer twice, with and without activation checkpoints.

The argument is plain, reentrant or kept. Several arguments run as forked.py says.
"""

import sys
from pathlib import Path

import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(512, 512), nn.ReLU())
        self.line = nn.Linear(512, 512)

    def forward(self, x):
        for _ in range(3):
            if mode == "plain":
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=mode == "reentrant")
        for _ in range(2):
            x = self.line(x)
        return x


mode = forked.each(sys.argv[1:])
model = Shared().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(64, 512, device="cuda", requires_grad=True)
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
