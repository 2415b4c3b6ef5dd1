"""Liger-Kernel's Megatron benchmark: silu of one half times the other, bf16, sequence 2048, batch 4."""

import torch
from harness import figure
from harness.liger import peak, sweep


def case(size, _):
    x = torch.randn(2048, 4, 2 * size, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def full():
        x.grad = None
        gate, up = torch.chunk(x, 2, -1)
        y = torch.nn.functional.silu(gate) * up
        y.sum().backward()

    figure(f"ffn_local={size}", allocated=peak(full))


sweep("ffn_local", case)
