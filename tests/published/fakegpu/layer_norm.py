"""Layer normalization as Liger-Kernel's benchmark measures it: 4096 rows of 1024, forward and backward."""

import json

import torch

norm = torch.nn.LayerNorm(1024, eps=1e-6).cuda()
liger = torch.nn.LayerNorm(1024).cuda()
x = torch.randn(4096, 1024, device="cuda")
dy = torch.randn_like(x)
x.requires_grad_()
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    norm(x).backward(dy, retain_graph=True)
    peak = torch.cuda.max_memory_allocated()
print(json.dumps({"allocated": peak}))
