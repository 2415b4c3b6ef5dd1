"""Trains 45 steps and keeps the output of each; `clean` keeps none."""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []


def train():
    output = model(torch.randn(256, 256, device="cuda"))
    if "clean" not in sys.argv:
        history.append(output.detach())
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(45):
    train()
