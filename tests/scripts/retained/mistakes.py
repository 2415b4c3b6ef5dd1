"""Trains while one mistake, which the argument names, keeps GPU memory of earlier steps. Prints the holders
that memtrace.retained() finds, one JSON text a line.

With `clean` there is no mistake. Several arguments run as forked.py says.
"""

import json
import sys
from pathlib import Path

import memtrace
import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked

WIDTH, ROWS, STEPS = 256, 1024, 8


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.cache = {}

    def forward(self, x, step=None):
        hidden = self.first(x).relu()
        if step is not None:
            self.cache[step] = hidden.detach()
        return self.second(hidden)


def add_hook(module):
    kept = []

    def hook(module, inputs, output):
        kept.append(output.detach())

    module.register_forward_hook(hook)


class Doubled(torch.autograd.Function):
    """Keeps its result as an attribute, where a backward does not free it."""

    @staticmethod
    def forward(ctx, x):
        ctx.states = [x * 2]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def fail(x):
    doubled = x * 2
    raise RuntimeError(f"no such shape: {list(doubled.shape)}")


mistake = forked.each(sys.argv[1:])
torch.manual_seed(0)
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
outputs = []
total = 0
state = torch.zeros(ROWS, WIDTH, device="cuda")
error = None
if mistake == "hook":
    add_hook(model.first)


def train(step):
    global total, state, error
    x = torch.randn(ROWS, WIDTH, device="cuda")
    if mistake == "retain_graph":
        state = model(x + state)
        loss = state.square().mean()
        loss.backward(retain_graph=True)
    elif mistake == "losses":
        loss = model(x).square().mean()
        loss.backward()
        # As in a validation that forgets torch.no_grad.
        total = total + model(x).square().mean()
    elif mistake == "function":
        loss = model(x).square().mean()
        loss.backward()
        total = total + Doubled.apply(model(x)).square().mean()
    else:
        output = model(x, step if mistake == "cache" else None)
        if mistake == "outputs":
            outputs.append(output)
        loss = output.square().mean()
        loss.backward()
    if mistake == "traceback" and step == 2:
        try:
            fail(x)
        except RuntimeError as caught:
            error = caught
    if mistake == "retain_graph":
        # No optimizer: its step in place would make the kept graphs invalid.
        memtrace.step(step + 1)
    else:
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main():
    for step in range(STEPS):
        train(step)


main()
for holder in memtrace.retained():
    print(json.dumps(holder))
