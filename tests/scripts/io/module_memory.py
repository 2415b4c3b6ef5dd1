"""Prints the memory of modules as MemTracker computes it, as JSON.

By module: [parameters, buffers, inputs of the last call, outputs of the last call], in bytes.
"""

import json
import time

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker


class Mixer(nn.Module):
    """Takes a tuple, two of whose tensors share a storage, and returns views."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(300))

    def forward(self, pair, extra):
        first, second = pair
        x = self.linear(first + second)
        return {"whole": x, "part": x[:2]}, extra


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 40)
        self.mixer = Mixer(40)
        self.norm = nn.BatchNorm1d(40)
        self.head = nn.Linear(40, 100, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, x):
        x = self.tokens(x)
        results, _ = self.mixer((x, x.view(-1, 40)), x)
        return self.head(self.norm(results["whole"]))


torch.manual_seed(0)
model = Net().cuda()
x = torch.arange(100, device="cuda")
tracker = MemTracker()
tracker.track_external(model, x)
with tracker:
    model(x).sum().backward()
print(
    json.dumps(
        {
            stats.mod_fqn: [stats.parameter_mem, stats.buffer_mem, stats.input_mem, stats.output_mem]
            for stats in tracker.memory_tracking.values()
        }
    )
)
# Waits for autograd's thread, which still releases the tracker's callbacks. If Python ends before it has, it
# aborts, traced or not (one of ten untraced runs did).
time.sleep(0.5)
