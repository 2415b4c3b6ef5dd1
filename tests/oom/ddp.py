"""Trains on 8 GPUs: ddp.py ddp|fsdp|save|whole|unsynced [fix]."""

import os
import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

KIND, FIX = sys.argv[1], "fix" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(8))
)
if KIND == "ddp":
    model = DistributedDataParallel(model.cuda(), gradient_as_bucket_view=FIX)
else:
    if FIX or KIND in ("save", "whole", "unsynced"):
        for block in model:
            fully_shard(block, reshard_after_forward=False if KIND == "whole" and not FIX else None)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(os.environ.get("STEPS", 3))):
    for part in range(4 if KIND == "unsynced" else 1):
        if KIND == "unsynced":
            model.set_requires_gradient_sync(FIX or part == 3)
        loss = model(torch.randn(512, 2048, device="cuda")).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if KIND == "save":
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=FIX))
torch.distributed.destroy_process_group()
