"""Trains with FSDP2: each rank holds a shard of the model, and gathers one layer at a time.

memtrace run --phantom 4xh100-80g -o out -- torchrun --nproc-per-node 4 examples/fsdp2.py
memtrace ranks out
memtrace peak --by category out
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layer = lambda: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
model = nn.Sequential(*(layer() for _ in range(4))).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 128, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
dist.destroy_process_group()
