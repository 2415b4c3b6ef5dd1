"""Trains on a thread while the main thread waits for it, and runs out of memory there if asked to."""

import sys
import threading

import torch
from torch import nn


def train() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("peak", torch.cuda.max_memory_allocated())
    if "oom" in sys.argv:
        held = []
        try:
            while True:
                held.append(model(torch.randn(1 << 20, 256, device="cuda")))
        except torch.cuda.OutOfMemoryError:
            print("out of memory")


thread = threading.Thread(target=train)
thread.start()
thread.join()
print(threading.active_count())
