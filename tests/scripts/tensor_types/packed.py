"""Runs a layer whose weight is a tensor subclass, and a table in float32: packed.py [ROWS [EXPERTS]].

The weight has int8 values and a scale for each of its ROWS rows (default: 512). EXPERTS is the number of
fused experts in bfloat16, of 1 MiB each (default: 0).
"""

import sys

import torch
from torch import nn


class Packed(torch.Tensor):
    @staticmethod
    def __new__(cls, values, scale):
        shape = values.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def whole(self):
        return self.values.to(self.scale.dtype) * self.scale[:, None]

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        plain = [arg.whole() if isinstance(arg, Packed) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


rows = int(sys.argv[1]) if sys.argv[1:] else 512
layer = nn.Linear(4 * rows, rows, bias=False)
values = torch.zeros(rows, 4 * rows, dtype=torch.int8, device="cuda")
scale = torch.ones(rows, dtype=torch.bfloat16, device="cuda")
layer.weight = nn.Parameter(Packed(values, scale), requires_grad=False)


class Experts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.up = nn.Parameter(torch.ones(experts, 1024, 512, dtype=torch.bfloat16, device="cuda"))

    def forward(self, x):
        return x @ self.up[0]


experts = Experts(int(sys.argv[2])) if sys.argv[2:] else None
# A table in float32 beside it, as most of the peak.
table = nn.Embedding(200_000, 512).cuda()
with torch.no_grad():
    table(torch.tensor([1], device="cuda"))
    layer(torch.ones(4, 4 * rows, dtype=torch.bfloat16, device="cuda"))
    if experts:
        experts(torch.ones(4, 1024, dtype=torch.bfloat16, device="cuda"))
