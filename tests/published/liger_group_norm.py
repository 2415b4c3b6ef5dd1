"""Liger-Kernel: nn.GroupNorm in fp32, 128 samples of 512, four channels a group; `--mode` has no effect."""

import torch
from harness.liger import backward_by, sweep


def case(C, _):
    norm = torch.nn.GroupNorm(C // 4, C, eps=1e-6).cuda()
    liger = torch.nn.GroupNorm(C // 4, C).cuda()  # noqa: F841 - Liger's layer stays allocated
    x = torch.randn(128, C, 512, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()
    backward_by(f"C={C}", lambda: norm(x), dy)


sweep("C", case)
