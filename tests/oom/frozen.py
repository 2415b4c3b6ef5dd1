"""Trains a part of a model, but leaves gradients on for the rest: frozen.py adapters|perceptual [fix]."""

import os
import sys

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))


class LoraLinear(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self, width=1024, heads=16):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, words=8192, layers=24, width=1024):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.PReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x):
        return x + self.body(x)


class Generator(nn.Module):
    def __init__(self, width=64, blocks=8):
        super().__init__()
        self.head = nn.Conv2d(3, width, 9, padding=4)
        self.body = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.up = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.tail = nn.Conv2d(width, 3, 9, padding=4)

    def forward(self, x):
        x = self.head(x)
        return self.tail(self.up(x + self.body(x)))


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.vgg = torchvision.models.vgg19(weights=None).features[:36].eval()
        if FIX:
            self.vgg.requires_grad_(False)

    def forward(self, output, target):
        return F.mse_loss(self.vgg(output), self.vgg(target))


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adapters():
    """Adapters written by hand. The optimizer has them alone, but the base is not frozen."""
    model = GPT()
    for block in model.blocks:
        block.qkv, block.out = LoraLinear(block.qkv), LoraLinear(block.out)
    adapters = [p for name, p in model.named_parameters() if name.endswith((".a", ".b"))]
    if FIX:
        model.requires_grad_(False)
        for p in adapters:
            p.requires_grad_(True)
    model.cuda()
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    for _ in range(STEPS):
        tokens = torch.randint(0, 8192, (4, 256), device="cuda")
        update(F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()), optimizer)


def perceptual():
    """Super resolution with a loss over the features of a VGG that is not frozen."""
    generator, loss_of = Generator().cuda(), PerceptualLoss().cuda()
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
    for _ in range(STEPS):
        target = torch.rand(8, 3, 192, 192, device="cuda")
        output = generator(F.interpolate(target, scale_factor=0.5))
        update(F.l1_loss(output, target) + 0.01 * loss_of(output, target), optimizer)


{"adapters": adapters, "perceptual": perceptual}[KIND]()
