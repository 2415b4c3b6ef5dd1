"""Liger-Kernel: nn.CrossEntropyLoss in fp32, 16384 tokens."""

import torch
from harness.liger import loss, sweep


def case(V, arguments):
    logits = torch.randn(8 * 2048, V, requires_grad=True, device="cuda")
    target = torch.randint(V, (8 * 2048, 1), device="cuda").squeeze(1)
    criterion = torch.nn.CrossEntropyLoss()
    loss(f"V={V}", lambda: criterion(logits, target))


sweep("V", case)
