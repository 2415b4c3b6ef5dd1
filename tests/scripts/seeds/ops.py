"""Ops that allocate and free memory, for a test that each op counts all that it allocated."""

import torch

GIB = 2**30

for size in (1, 3, 4):
    block = torch.empty(size * GIB, dtype=torch.uint8, device="cuda")
    del block
block = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")

image = torch.ones(8, 3, 512, 512, device="cuda", requires_grad=True)
torch.nn.functional.max_pool2d(image, 2).sum().backward()
