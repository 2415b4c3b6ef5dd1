"""Lightning's page on tensor parallelism: a feed-forward block of 8192 by 8192, one training step.

Runs one rank of a group whose peers do not exist: the memory of a rank does not depend on them.

    tensor_parallel.py RANKS
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.gate(x))


ranks = int(sys.argv[1])
with torch.device("meta"):
    model = FeedForward(8192, 8192)
model.to_empty(device="cpu")
if ranks > 1:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = dist.init_device_mesh("cuda", (ranks,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "gate": ColwiseParallel()}
    model = parallelize_module(model, mesh, plan)  # the weights in the page's order
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
for _ in range(3):
    output = model(torch.rand(8, 8192).cuda())
    loss = output.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(json.dumps({"label": f"{ranks} GPUs", "allocated": torch.cuda.max_memory_allocated()}))
