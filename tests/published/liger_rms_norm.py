"""Liger-Kernel: Llama's RMSNorm in bf16, 2048 rows, with fp32 weights as the benchmark has them."""

import torch
from harness.liger import backward_by, sweep


class LlamaNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + 1e-6)
        return self.weight * wide.to(x.dtype)


def case(H, _):
    norm = LlamaNorm(H).cuda()
    liger = LlamaNorm(H).cuda()  # noqa: F841 - Liger's layer stays allocated
    x = torch.randn(2048, H, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()
    backward_by(f"H={H}", lambda: norm(x), dy)


sweep("H", case)
