"""PyTorch's tutorial on an optimizer step in the backward pass: ViT-L/16, one image, Adam, three steps.

`--variant hooks` steps each parameter as soon as its gradient is there, with an optimizer of its own.
"""

import argparse

import torch
from harness import figure
from torchvision import models

parser = argparse.ArgumentParser()
parser.add_argument("--variant", choices=["plain", "hooks"], required=True)
hooks = parser.parse_args().variant == "hooks"

model = models.vit_l_16(weights=None).cuda()
if hooks:
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
else:
    optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = model(torch.rand(1, 3, 224, 224).cuda())
    loss.sum().backward()
    if not hooks:
        optimizer.step()
        optimizer.zero_grad()
figure("peak", allocated=torch.cuda.max_memory_allocated())
