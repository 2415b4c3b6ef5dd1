"""Liger-Kernel: nn.LayerNorm in fp32, 4096 rows."""

import torch
from harness.liger import backward_by, sweep


def case(N, _):
    norm = torch.nn.LayerNorm(N, eps=1e-6).cuda()
    liger = torch.nn.LayerNorm(N).cuda()  # noqa: F841 - Liger's layer stays allocated
    x = torch.randn(4096, N, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()
    backward_by(f"N={N}", lambda: norm(x), dy)


sweep("N", case)
