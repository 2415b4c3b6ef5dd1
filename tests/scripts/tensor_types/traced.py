"""Traces a model with torch.jit.trace and make_fx. Prints the graphs, guards and the number of warnings."""

import warnings

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, rows, other):
        return self.layer(rows) * self.scale + other.sum()


model = Net().cuda()
rows, other = torch.ones(3, 8, device="cuda"), torch.ones(5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for calls_before in (0, 1):
        for _ in range(calls_before):
            model(rows, other.cuda())
        traced = torch.jit.trace(model, (rows, other.cuda()), check_trace=False)
        print(traced.graph)
        symbolic = make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        graph = symbolic(rows, other.cuda())
        print(graph.code)
        print([str(guard) for guard in graph.shape_env.guards])
print(len(caught))
