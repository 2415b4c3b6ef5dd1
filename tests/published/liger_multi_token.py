"""Liger-Kernel: attention scores of two samples and four heads, mixed by a 3 x 3 convolution.

`--variant sparse` takes sparsemax in fp32 in place of softmax in bf16.
"""

import torch
from harness.liger import backward_by, sweep


class Mixed(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, 4, 3, 3, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(4, dtype=dtype))

    def convolved(self, probabilities):
        return torch.nn.functional.conv2d(probabilities, self.weight, self.bias, stride=1, padding=1)

    def forward(self, scores):
        L = scores.shape[-1]
        mask = torch.tril(torch.ones(L, L, dtype=torch.bool, device=scores.device)).view(1, 1, L, L)
        lowest = torch.tensor(-1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.tensor(0.0, device=scores.device, dtype=scores.dtype)
        masked = scores.masked_fill(~mask, lowest)
        probabilities = torch.nn.functional.softmax(masked, dim=-1)
        return self.convolved(probabilities).masked_fill(~mask, zero)


class Sparse(Mixed):
    def forward(self, scores):
        L = scores.shape[-1]
        mask = torch.tril(torch.ones(L, L, dtype=torch.bool, device=scores.device)).view(1, 1, L, L)
        lowest = torch.tensor(-1e9, device=scores.device)
        zero = torch.tensor(0.0, device=scores.device)
        z = scores.masked_fill(~mask, lowest)
        ordered, _ = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        ranks = torch.arange(1, L + 1, device=z.device, dtype=z.dtype).view(1, 1, 1, L)
        positive = ordered > -1e8
        condition = (1 + ranks * ordered > sums) & positive
        k = torch.sum(condition, dim=-1, keepdim=True)
        k_safe = torch.max(k, torch.ones_like(k))
        sum_k = torch.gather(sums, dim=-1, index=k_safe.long() - 1)
        tau = (sum_k - 1) / k_safe.to(z.dtype)
        tau = torch.where(k == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        return self.convolved(probabilities).masked_fill(~mask, zero)


def case(L, arguments):
    sparse = arguments.variant == "sparse"
    kind, dtype = (Sparse, torch.float32) if sparse else (Mixed, torch.bfloat16)
    mixed, liger = kind(dtype).cuda(), kind(dtype).cuda()  # noqa: F841 - Liger's layer stays allocated
    x = torch.randn(2, 4, L, L, dtype=dtype, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()
    backward_by(f"L={L}", lambda: mixed(x), dy)


sweep("L", case)
