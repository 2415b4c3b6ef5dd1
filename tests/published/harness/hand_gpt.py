"""The GPT of "Build a Large Language Model (From Scratch)" in the stages of its page on training speed."""

import torch
from torch import nn
from torch.nn import functional as F

STAGES = ["original", "mask", "bfloat16", "classes", "flash", "padded", "batch"]
WIDTH, HEADS, LAYERS, LENGTH, DROPOUT = 768, 12, 12, 1024, 0.1
on_the_fly = classes = flash = False
vocabulary = 50257


def choose(name):
    """Selects the stage of the models that are made after this call."""
    global on_the_fly, classes, flash, vocabulary
    stage = STAGES.index(name)
    on_the_fly, classes, flash = stage >= 1, stage >= 3, stage >= 4
    vocabulary = 50304 if stage >= 5 else 50257


class HandLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class HandGelu(nn.Module):
    def forward(self, x):
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.split = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(0 if flash else 3))
        self.joint = nn.Linear(WIDTH, 3 * WIDTH, bias=False) if flash else None
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        if not on_the_fly:
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))

    def forward(self, x):
        batch, length, _ = x.shape
        if flash:
            q, k, v = self.joint(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            dropout = DROPOUT if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
            return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, WIDTH))
        k, q, v = (linear(x).view(batch, length, HEADS, -1).transpose(1, 2) for linear in self.split)
        scores = q @ k.transpose(2, 3)
        if on_the_fly:
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        else:
            mask = self.mask.bool()[:length, :length]
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        norm, gelu = (nn.LayerNorm, nn.GELU("tanh")) if classes else (HandLayerNorm, HandGelu())
        self.attention, self.dropout = Attention(), nn.Dropout(DROPOUT)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.first, self.second = norm(WIDTH), norm(WIDTH)

    def forward(self, x):
        shortcut = x
        x = self.first(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.second(x)
        x = self.ff(x)
        x = self.dropout(x)
        return x + shortcut


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout, self.blocks = nn.Dropout(DROPOUT), nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH) if classes else HandLayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))
