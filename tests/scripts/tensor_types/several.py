"""Trains a model with parameters of several types, and prints their types and shapes: several.py LENGTH...

Trains one step with an input of each length. Prints for each parameter its module, name, type, shape and the
type and shape of one of its states, as JSON.
"""

import json
import sys

import torch
from torch import nn

LENGTHS = [int(length) for length in sys.argv[1:]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 2048)
        self.layer = nn.Linear(2048, 2048)
        self.norm = nn.LayerNorm(2048)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("position", torch.zeros(64, 32, dtype=torch.int32))
        # A part of a larger storage, so the block has no single shape.
        self.part = nn.Parameter(torch.zeros(1024)[:100])

    def forward(self, tokens, options):
        inner = self.layer(self.table(tokens)).float()
        return (self.norm(inner) * self.scale).mean() + self.part.sum()


model = Net().cuda().to(torch.bfloat16)
model.norm.float()
flat = torch.zeros(1024, device="cuda")
model.part.data = flat[:100]
optimizer = torch.optim.AdamW(model.parameters())
for length in LENGTHS:
    tokens = torch.randint(100, (2, length), device="cuda")
    options = {"mask": torch.ones(3, device="cuda"), "ids": [1, 2], "lazy": nn.UninitializedParameter()}
    model(tokens, options).backward()
    optimizer.step()
    optimizer.zero_grad()

found = {}
for name, parameter in model.named_parameters():
    state = optimizer.state[parameter]["exp_avg"]
    found["Net." + name] = [
        [str(tensor.dtype).removeprefix("torch."), f"[{'x'.join(map(str, tensor.shape))}]"]
        for tensor in (parameter, state)
    ]
print(json.dumps(found))
