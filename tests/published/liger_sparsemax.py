"""Liger-Kernel: sparsemax by a sort, 2048 rows of V, fp32."""

import torch
from harness.liger import backward_by, sweep


def sparsemax(x):
    ordered, _ = torch.sort(x, dim=1, descending=True)
    sums = torch.cumsum(ordered, dim=1)
    ranks = torch.arange(1, x.size(1) + 1, device=x.device, dtype=x.dtype).view(1, -1)
    bound = 1 + ranks * ordered
    support = bound > sums
    k = support.sum(dim=1, keepdim=True).clamp(min=1)
    support_sum = (ordered * support).sum(dim=1, keepdim=True)
    tau = (support_sum - 1) / k
    return torch.clamp(x - tau, min=0)


def case(V, _):
    x = torch.randn(4 * 512, V, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()
    backward_by(f"V={V}", lambda: sparsemax(x), dy)


if __name__ == "__main__":
    sweep("V", case)
