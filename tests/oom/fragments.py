"""Runs out of memory by fragmentation: fragments.py pinned|lengths [fix]."""

import os
import sys

import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 40))


def pinned():
    """Small results between large temporaries: every segment keeps one live block."""
    kept, temporary = [], []
    results = torch.zeros(60, 2 << 18, device="cuda") if FIX else None
    for index in range(60):
        kept.append(results[index] if FIX else torch.zeros(2 << 18, device="cuda"))
        temporary += [torch.zeros(9 << 18, device="cuda") for _ in range(2)]
    del temporary
    torch.zeros(400 << 18, device="cuda")


def lengths():
    """Batches of growing length: no cached block fits the next batch."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8))
    ).cuda()
    for step in range(STEPS):
        model(torch.randn(4, 700 + 61 * (step % 40), 512, device="cuda")).sum().backward()
        model.zero_grad()


{"pinned": pinned, "lengths": lengths}[KIND]()
