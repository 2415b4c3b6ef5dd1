"""Trains with DistributedDataParallel, whose gradient buckets and NCCL buffers take memory of their own.

memtrace run --phantom 2xh100-80g -o out -- torchrun --nproc-per-node 2 examples/ddp.py
memtrace ranks out
memtrace ledger out          # NCCL has a row of its own
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
model = DistributedDataParallel(model, gradient_as_bucket_view=False)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
dist.destroy_process_group()
