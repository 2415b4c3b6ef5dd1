"""Liger-Kernel: the GRPO loss by a linear layer onto a vocabulary of 128256 and a reference, T 1024, bf16.

`--alone 1`: as in the second data file, without Liger's layers; the gradient is made in the measured part.
`--blackwell 1` sets the 32 MiB that torch takes for cuBLAS on a B200 in versions after 2.11.
"""

import os

import torch
import torch.nn.functional as F
from harness.liger import loss, measure, sweep

VOCABULARY, HIDDEN, LENGTH = 128256, 4096, 1024


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        kind = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
        self.policy = torch.nn.Linear(HIDDEN, VOCABULARY, **kind)
        self.reference = torch.nn.Linear(HIDDEN, VOCABULARY, **kind)

    def forward(self, x, tokens, mask, advantages, x_reference, by_sequence):
        logits = x @ self.policy.weight.t()
        logs = F.log_softmax(logits.float(), dim=-1)
        mine = logs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = x_reference @ self.reference.weight.t()
            reference_logs = F.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_logs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        ratio = mine - mine.detach()
        if by_sequence:
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        first = torch.exp(ratio)
        second = torch.clamp(first, 1 - 0.2, 1 + 0.2)
        losses = -torch.min(first * advantages.unsqueeze(1), second * advantages.unsqueeze(1))
        kl = torch.exp(reference - mine) - (reference - mine) - 1.0
        losses = losses + 0.1 * kl
        return (losses * mask).sum() / torch.clamp(mask.sum(), min=1.0)


def case(B, arguments):
    if arguments.blackwell:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    heads = Heads()
    liger = None if arguments.alone else Heads()  # noqa: F841 - Liger's layers stay allocated, too
    x = torch.randn(B, LENGTH, HIDDEN, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    tokens = torch.randint(0, VOCABULARY, (B, LENGTH), device="cuda")
    mask = torch.ones(B, LENGTH, device="cuda")
    advantages = torch.randn(B, dtype=torch.bfloat16, device="cuda")
    other = torch.randn(B, LENGTH, HIDDEN, dtype=torch.bfloat16, device="cuda")
    by_sequence = arguments.variant == "sequence"
    label, forward = f"B={B}", lambda: heads(x, tokens, mask, advantages, other, by_sequence)
    if arguments.alone:
        measure(label, forward)
    else:
        loss(label, forward)


sweep("B", case, alone=0, blackwell=0)
