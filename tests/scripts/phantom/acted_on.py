"""Reads values that no kernel computed: prints and checks them, and lets them decide a loop or a size."""

import sys

import torch

kind = sys.argv[1]
x = torch.rand(64, device="cuda")
print(f"loss {x.mean().item():.3f}")
right = 0
right += int((x > 0.5).sum())
assert torch.isfinite(x).all() and (x >= 0).all()
if not (x <= 1).all():
    raise ValueError(x)
known = torch.tensor([3, 0, 5], device="cuda")
assert known.nonzero().shape == (2, 1) and int(known.max()) == 5
if kind == "loop":
    rounds = 0
    while x.mean() < 0.5 and rounds < 5:
        rounds += 1
elif kind == "size":
    torch.empty(int(x.argmax()) + 1, device="cuda")
