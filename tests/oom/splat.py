"""Gaussian splatting: densification adds Gaussians, with their state of Adam: splat.py [fix]."""

import os
import sys

import torch
from torch import nn

FIX = "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 60))
EVERY = 25
N = 200_000
MOST = 300_000

SIZES = {"xyz": 3, "f_dc": 3, "f_rest": 45, "opacity": 1, "scaling": 3, "rotation": 4}
params = {name: nn.Parameter(torch.randn(N, size, device="cuda")) for name, size in SIZES.items()}
optimizer = torch.optim.Adam(
    [{"params": [p], "lr": 1e-3, "name": name} for name, p in params.items()], lr=0.0, eps=1e-15
)


def densify(chosen):
    """Clones the chosen Gaussians, as the reference does (cat_tensors_to_optimizer)."""
    for group in optimizer.param_groups:
        old = group["params"][0]
        extension = old.detach()[chosen]
        state = optimizer.state.pop(old)
        state["exp_avg"] = torch.cat((state["exp_avg"], torch.zeros_like(extension)))
        state["exp_avg_sq"] = torch.cat((state["exp_avg_sq"], torch.zeros_like(extension)))
        group["params"][0] = nn.Parameter(torch.cat((old.detach(), extension)))
        optimizer.state[group["params"][0]] = state
        params[group["name"]] = group["params"][0]


target = torch.rand(3, 256, 256, device="cuda")
for step in range(STEPS):
    features = torch.cat((params["f_dc"], params["f_rest"]), 1)
    colors = features.sigmoid().mean(1)
    scale, rotation = params["scaling"].exp(), nn.functional.normalize(params["rotation"])
    weights = params["opacity"].sigmoid().squeeze(1) * scale.prod(1) * rotation[:, 0]
    image = (weights * colors).sum() * torch.ones_like(target) + params["xyz"].mean()
    loss = (image - target).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % EVERY == EVERY - 1 and not (FIX and len(params["xyz"]) >= MOST):
        n = len(params["xyz"])
        densify(torch.arange(n // 2, device="cuda"))
