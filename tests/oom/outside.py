"""Memory that libraries take outside PyTorch: outside.py cudamalloc|nccl|none [fix]."""

import ctypes
import os
import sys

import torch
from torch import nn

KIND = "none" if "fix" in sys.argv else sys.argv[1]
torch.cuda.init()
if KIND == "cudamalloc":  # as a renderer or a decoder does
    place = ctypes.c_void_p()
    assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(place), ctypes.c_size_t(700 << 20)) == 0
elif KIND == "nccl":
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    groups = [torch.distributed.new_group() for _ in range(1)]
    for group in [None, *groups]:
        torch.distributed.all_reduce(torch.ones(1, device="cuda"), group=group)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(os.environ.get("STEPS", 4))):
    loss = model(torch.randn(4096, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
