"""pytorch-hessian-eigenthings: cross entropy's Hessian times a vector, eager, fp32, 64 x 256 x 50304."""

import torch
from harness import figure

ROWS, VOCABULARY = 64 * 256, 50304


def product(logits, u, valid, count):
    p = torch.softmax(logits, dim=-1)
    dot = (p * u).sum(dim=-1, keepdim=True)
    return (p * u - p * dot) * valid.unsqueeze(-1) / count


logits = torch.randn(ROWS, VOCABULARY, device="cuda")
u = torch.randn(ROWS, VOCABULARY, device="cuda")
valid = torch.ones(ROWS, device="cuda")
count = valid.sum()
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    result = product(logits, u, valid, count)
    size = torch.cuda.max_memory_allocated()
    del result
figure("eager", allocated=size)
