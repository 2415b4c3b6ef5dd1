"""Trains a small model under torch.profiler, which exports its Chrome trace to the file in argv[1].

Prints the peak of allocated memory while the profiler ran, and the allocated bytes at its end.
"""

import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
torch.cuda.reset_peak_memory_stats()
activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=activities, profile_memory=True, with_stack=True) as profiler:
    for _ in range(3):
        net(torch.randn(256, 512, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
profiler.export_chrome_trace(sys.argv[1])
print(peak, end)
