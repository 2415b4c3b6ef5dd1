"""Kernels that are not PyTorch's own: custom_kernels.py triton|xformers|liger."""

import sys

import torch
from peaks import print_peak


def triton():
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

    x = torch.randn(1 << 20, device="cuda")
    for _ in range(3):
        out = torch.empty_like(x)
        add[(triton.cdiv(x.numel(), 1024),)](x, x, out, x.numel(), BLOCK=1024)
    print(tuple(out.shape))


def xformers():
    from xformers.ops import memory_efficient_attention

    for _ in range(3):
        q, k, v = (
            torch.randn(2, 256, 8, 64, device="cuda", dtype=torch.float16, requires_grad=True)
            for _ in range(3)
        )
        memory_efficient_attention(q, k, v).sum().backward()


def liger():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = torch.randn(512, 512, device="cuda", requires_grad=True)
    weight = torch.randn(4096, 512, device="cuda", requires_grad=True)
    labels = torch.randint(0, 4096, (512,), device="cuda")
    LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels).backward()


torch.manual_seed(0)
globals()[sys.argv[1]]()
print("done")
print_peak()
