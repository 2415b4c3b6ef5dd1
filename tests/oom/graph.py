"""Passes messages along the edges of a large graph: graph.py LAYERS [fix]."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NODES, EDGES, WIDTH = 50_000, 400_000, 128
LAYERS, FIX = int(sys.argv[1]), "fix" in sys.argv


class Layer(nn.Module):
    """Computes a message for each edge from both of its nodes, and sums the messages for each node."""

    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, edges):
        messages = self.message(torch.cat([x[edges[0]], x[edges[1]]], -1))
        summed = torch.zeros_like(x).index_add_(0, edges[1], messages)
        return F.relu(self.update(torch.cat([x, summed], -1)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x, edges):
        for layer in self.layers:
            x = checkpoint(layer, x, edges, use_reentrant=False) if FIX else layer(x, edges)
        return self.head(x)


model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(NODES, WIDTH, device="cuda")
edges = torch.randint(0, NODES, (2, EDGES), device="cuda")
labels = torch.randint(0, 16, (NODES,), device="cuda")
for _ in range(int(os.environ.get("STEPS", 3))):
    F.cross_entropy(model(x, edges), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
