"""Cross entropy as Liger-Kernel's benchmark measures it: 16384 tokens, a vocabulary of 4096."""

import json

import torch

logits = torch.randn(8 * 2048, 4096, requires_grad=True, device="cuda")
target = torch.randint(4096, (8 * 2048, 1), device="cuda").squeeze(1)
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    torch.nn.CrossEntropyLoss()(logits, target).backward()
    peak = torch.cuda.max_memory_allocated()
print(json.dumps({"allocated": peak}))
