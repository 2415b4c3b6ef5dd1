"""Prints the peak of loops that reduce a gradient and do not wait for the work, in gradients.

PyTorch 2.11 holds a tensor until NCCL's watchdog has seen that the collective ended, and releases it in the
next collective. The script's only argument is the number of steps.
"""

import os
import sys

import torch
import torch.distributed as dist

GRADIENT = 8 << 20
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8, device="cuda")).sum().backward()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
for _ in range(int(sys.argv[1])):
    model(torch.ones(1, 8, device="cuda")).sum().backward()
    gradient = torch.empty(GRADIENT, dtype=torch.uint8, device="cuda")
    dist.all_reduce(gradient, async_op=True).get_future().wait()
    del gradient
    optimizer.step()
    optimizer.zero_grad()
print("peak", (torch.cuda.max_memory_allocated() - before) // GRADIENT)
dist.destroy_process_group()
