"""Trains beside another process that holds MIB on the GPU: neighbour.py MIB [alone]."""

import os
import subprocess
import sys

import torch
from torch import nn

HOLD = """
import torch
held = torch.empty({mib} << 20, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
input()
"""
neighbour = None
if "alone" not in sys.argv:
    code = HOLD.format(mib=int(sys.argv[1]))
    neighbour = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    neighbour.stdout.readline()
try:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(int(os.environ.get("STEPS", 4))):
        loss = model(torch.randn(4096, 2048, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    if neighbour:
        neighbour.communicate(b"\n")
