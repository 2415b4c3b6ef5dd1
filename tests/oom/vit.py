"""Trains a vision model of timm or torchvision: vit.py MODEL BATCH [half] [fix | sgd]."""

import os
import sys

import timm
import torch

NAME, BATCH = sys.argv[1], int(sys.argv[2])
model = timm.create_model(NAME, num_classes=1000).cuda()
if "fix" in sys.argv:
    model.set_grad_checkpointing()
make = torch.optim.SGD if "sgd" in sys.argv else torch.optim.AdamW
optimizer = make(model.parameters(), lr=1e-3)
size = model.default_cfg["input_size"]
for _ in range(int(os.environ.get("STEPS", 3))):
    images = torch.randn(BATCH, *size, device="cuda")
    labels = torch.randint(0, 1000, (BATCH,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled="half" in sys.argv):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
