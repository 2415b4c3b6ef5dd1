"""Trains a student while a teacher is on the GPU: two.py teacher [fix]."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIX = "fix" in sys.argv


def network(width):
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(6)
        )
    )


teacher, student = network(2048).cuda(), network(512).cuda()
if FIX:
    teacher = teacher.bfloat16().requires_grad_(False)
enter, leave = nn.Linear(2048, 512).cuda(), nn.Linear(512, 2048).cuda()
optimizer = torch.optim.AdamW([*enter.parameters(), *student.parameters(), *leave.parameters()])
for _ in range(int(os.environ.get("STEPS", 4))):
    x = torch.randn(4096, 2048, device="cuda")
    wanted = teacher(x.to(next(teacher.parameters()).dtype))
    loss = F.mse_loss(leave(student(enter(x))), wanted.detach().float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
