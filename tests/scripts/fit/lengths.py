"""Embeds tokens: lengths.py [LENGTH]. Without LENGTH, the third of four samples is the longest."""

import sys

import torch

model = torch.nn.Sequential(torch.nn.Embedding(100, 1024), torch.nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in [int(sys.argv[1])] * 4 if sys.argv[1:] else [300, 200, 9000, 250]:
    model(torch.zeros(2, length, dtype=torch.int64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
