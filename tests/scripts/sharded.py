"""FSDP over several ranks, one of which takes a larger batch: torchrun --nproc-per-node 4 sharded.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import nvtx
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
WIDTH = 512


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.fc(x))


with nvtx.range("init"):
    layers = nn.ModuleList(Layer() for _ in range(4)).cuda()
    for layer in layers:
        fully_shard(layer)
optimizer = torch.optim.AdamW(layers.parameters())
for step in range(3):
    with nvtx.range(f"step:{step}"):
        # Rank 2 has a longer batch: the first difference between the ranks.
        x = torch.randn(96 if rank == 2 else 64, WIDTH, device="cuda")
        with nvtx.range("forward"):
            for index, layer in enumerate(layers):
                with nvtx.range(f"module:Net.layers.{index}"):
                    x = layer(x)
            loss = x.sum()
        with nvtx.range("backward"):
            loss.backward()
        with nvtx.range("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
