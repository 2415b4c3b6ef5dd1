"""Liger-Kernel's second data file: layers and losses on rows of 4096 in bf16, or of a vocabulary of 128256.

One layer is resident, and the gradient of the result is made in the measured part.
"""

import torch
import torch.nn.functional as F
from harness.liger import measure, sweep
from liger_add_rms_norm import AddNorm
from liger_divergence import jsd_rows
from liger_sparsemax import sparsemax

HIDDEN, VOCABULARY = 4096, 128256
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


class PolyNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = torch.nn.Parameter(torch.tensor(1.0))

    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        x = x.to(torch.float32)
        powers = x**3, x**2, x**1
        three, two, one = (self.scaled(power) for power in powers)
        y = self.weight[0] * three + self.weight[1] * two + self.weight[2] * one + self.bias
        return y.to(torch.bfloat16)


def row_layer(variant):
    if variant == "layer_norm":
        return torch.nn.LayerNorm(HIDDEN, eps=1e-6).to(**BF16)
    if variant == "group_norm":
        return torch.nn.GroupNorm(HIDDEN // 4, HIDDEN, eps=1e-6).to(**BF16)
    if variant == "poly_norm":
        return PolyNorm().cuda()
    return {"softmax": torch.nn.Softmax(dim=-1), "sparsemax": sparsemax}[variant]


def loss_of(variant, rows):
    logits = torch.randn(rows, VOCABULARY, requires_grad=True, device="cuda")
    if variant == "cross_entropy":
        target = torch.randint(VOCABULARY, (rows,), device="cuda")
        return lambda: F.cross_entropy(logits, target)
    mine = logits.log_softmax(dim=-1)
    other = torch.randn(rows, VOCABULARY, device="cuda")
    theirs = other.log_softmax(dim=-1) if variant == "jsd" else other.softmax(dim=-1)
    del other
    kl = torch.nn.KLDivLoss(reduction="batchmean")
    return lambda: (jsd_rows if variant == "jsd" else kl)(mine, theirs)


def case(rows, arguments):
    variant = arguments.variant
    if variant in ("cross_entropy", "jsd", "kl"):
        forward = loss_of(variant, rows)
    elif variant == "add_rms_norm":
        x, r = (torch.randn(rows, HIDDEN, **BF16, requires_grad=True) for _ in range(2))
        norm = AddNorm(HIDDEN).cuda()
        forward = lambda: norm(x, r)[0]
    else:
        shape = (rows // 512, HIDDEN, 512) if variant == "group_norm" else (rows, HIDDEN)
        x = torch.randn(shape, **BF16, requires_grad=True)
        layer = row_layer(variant)
        forward = lambda: layer(x)
    measure(f"BT={rows}", forward)


if __name__ == "__main__":
    sweep("BT", case)
