"""Leaks 3 MiB a step from `Encoder.cache`, beside what an ordinary training loop keeps and reuses."""

import torch
from torch.cuda import nvtx

STEPS = 12
LEAK = 3 << 20

kept = []
weight = torch.empty(1 << 20, device="cuda", requires_grad=True)
state = None
for step in range(STEPS):
    with nvtx.range(f"step:{step}"):
        with nvtx.range("forward"):
            with nvtx.range("module:Encoder.cache"):
                kept.append(torch.zeros(LEAK, dtype=torch.uint8, device="cuda"))
            with nvtx.range("module:Encoder.fc"):
                loss = (weight * 2).relu().sum()
        with nvtx.range("backward"):
            loss.backward()
        with nvtx.range("optimizer"):
            if state is None:
                state = torch.zeros_like(weight)
            weight.grad = None
    del loss
print(torch.cuda.memory_allocated())
