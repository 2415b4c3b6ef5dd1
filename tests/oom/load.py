"""Loads a checkpoint: load.py load|resume [fix].

`load` runs out of memory while it loads, `resume` in the training after it.
"""

import os
import sys
import tempfile

import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv


def network():
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(12)))


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    saved = {"model": network().state_dict(), "step": 100}
    if KIND == "load":
        saved["optimizer"] = [network().state_dict() for _ in range(2)]
    torch.save(saved, path)
    model = network().cuda()
    checkpoint = torch.load(path, map_location="cpu" if FIX else "cuda")
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(os.environ.get("STEPS", 4)) if KIND == "resume" else 0):
    loss = model(torch.randn(1024, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
