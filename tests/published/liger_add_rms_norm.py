"""Liger-Kernel: a residual addition and RMSNorm in fp32, 2048 rows."""

import torch
from harness import figure
from harness.liger import peak, sweep


class AddNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x, residual):
        kind = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(kind), residual.to(kind)


def case(H, _):
    norm = AddNorm(H).cuda()
    # Two layers of Liger stay allocated, too: one with a weight of its own and one inside.
    liger = [torch.nn.Parameter(torch.ones(H, device="cuda")) for _ in range(3)]  # noqa: F841
    x = torch.randn(2048, H, device="cuda")
    r = torch.randn(2048, H, device="cuda")
    dy, ds = torch.randn_like(x), torch.randn_like(r)
    x.requires_grad_()
    r.requires_grad_()

    def full():
        y, s = norm(x, r)
        torch.autograd.backward((y, s), (dy, ds))

    figure(f"H={H}", allocated=peak(full))


if __name__ == "__main__":
    sweep("H", case)
