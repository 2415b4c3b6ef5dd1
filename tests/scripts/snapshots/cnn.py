"""A small CNN. PyTorch's snapshot of it goes to the file in argv[1]."""

import os
import sys

import torch
from torch import nn

torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
head = nn.Linear(64, 10)
net.cuda()
head.cuda()
optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()])
for _ in range(3):
    images = torch.randn(16, 3, 64, 64, device="cuda")
    loss = head(net(images).mean((2, 3))).logsumexp(1).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss, images
torch.cuda.memory._dump_snapshot(sys.argv[1])
# End here, so that the trace ends where the snapshot does.
os._exit(0)
