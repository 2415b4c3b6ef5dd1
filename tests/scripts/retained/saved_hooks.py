"""Runs out of memory inside a checkpoint and inside hooks of saved tensors, and goes on."""

import memtrace
import torch
from torch.utils.checkpoint import checkpoint

weight = torch.ones(1 << 18, device="cuda", requires_grad=True)
devices = set()


def pack(tensor):
    devices.add(tensor.device.type)
    return tensor


def attention(x):
    y = x.sin()
    try:
        torch.empty(1 << 40, device="cuda")
    except torch.OutOfMemoryError:
        print("out of memory")
    return y.exp()


losses = []
memtrace.step(0)
checkpoint(attention, weight, use_reentrant=False).sum().backward()
for step in range(1, 8):
    memtrace.step(step)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooked = (weight * 2).exp()
        memtrace.retained()
    losses.append((weight * 2).exp().sum())
with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
    found = memtrace.retained()
print("packed:", devices)
print([(holder["name"], holder["graphs"]) for holder in found])
