"""Liger-Kernel's Megatron benchmark: nn.RMSNorm in bf16, a sequence of 4096, the gradient of a sum."""

import torch
from harness import figure
from harness.liger import peak, sweep


def case(H, _):
    norm = torch.nn.RMSNorm(H, eps=1e-6).cuda().to(torch.bfloat16)
    x = torch.randn(4096, 1, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def full():
        y = norm(x)
        y.sum().backward()

    figure(f"H={H}", allocated=peak(full))


sweep("H", case)
