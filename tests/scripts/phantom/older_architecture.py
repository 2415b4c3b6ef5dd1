"""Runs kernels that a library selects by compute capability, on a card between two compiled architectures."""

import torch

print(torch.cuda.get_arch_list(), torch.cuda.get_device_capability())
x = torch.randn(5000, device="cuda")
assert len(x.nonzero()) == len(torch.unique(x)) == 5000
table = torch.nn.Embedding(100, 8).cuda()
table(torch.randint(0, 100, (5000,), device="cuda")).sum().backward()
x.sort(), x.cumsum(0)
print("ok")
