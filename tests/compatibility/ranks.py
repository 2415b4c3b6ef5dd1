"""Two ranks under torchrun: ranks.py ddp|fsdp2."""

import os
import sys

import torch
import torch.distributed as dist
from peaks import print_peak
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)]
model = nn.Sequential(*layers).cuda()
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
else:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 128, 512, device="cuda")).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print("trained on", dist.get_world_size())
print_peak()
dist.destroy_process_group()
