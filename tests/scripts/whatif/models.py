"""Ten small models, each with its batch, its loss and a pattern of the modules to checkpoint."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 32000


class Model(nn.Module):
    """A model that computes its own loss."""

    # The modules to checkpoint, as a pattern for their paths.
    checkpointed = ""
    rows = 8

    def batch(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Returns the arguments of `forward` for a step with this many rows."""
        raise NotImplementedError

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        raise NotImplementedError


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), device="cuda")


def images(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, 3, size, size, device="cuda").to(dtype)


class Attention(nn.Module):
    """Attention with heads, by PyTorch's fused function."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.queries, self.pairs = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, memory=None, causal=False):
        memory = x if memory is None else memory
        key, value = self.pairs(memory).chunk(2, dim=-1)
        split = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.queries(x), key, value)
        ]
        y = F.scaled_dot_product_attention(*split, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


def perceptron(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class LanguageModel(Model):
    """A language model: its head and loss may work on one part of the tokens at a time."""

    length, parts, float_loss = 512, 1, False

    def batch(self, rows, dtype):
        return tokens(rows, self.length), tokens(rows, self.length)

    def loss(self, x, target):
        if self.parts == 1:
            logits = self.head(x).flatten(0, 1)
            return F.cross_entropy(logits.float() if self.float_loss else logits, target.flatten())
        x, target = x.flatten(0, 1), target.flatten()
        total = x.new_zeros(())
        for part, wanted in zip(x.chunk(self.parts), target.chunk(self.parts)):
            total = total + torch.utils.checkpoint.checkpoint(
                self.part_loss, part, wanted, use_reentrant=False
            )
        return total / len(x)

    def part_loss(self, x, target):
        return F.cross_entropy(self.head(x), target, reduction="sum")


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads), perceptron(width, 4 * width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x), causal=True))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(LanguageModel):
    checkpointed = "GPT.h.*"

    def __init__(self, width=768, layers=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(self.length, width)
        self.h = nn.ModuleList(GPTBlock(width, 12, 0.1) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x, target):
        x = self.wte(x) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.loss(self.ln_f(x), target)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.heads, inner = heads, 8 * width // 3 // 64 * 64
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        y = self.norm_1(x)
        q, k, v = (
            part.unflatten(-1, (-1, x.shape[-1] // self.heads)) for part in (self.q(y), self.k(y), self.v(y))
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (part.repeat_interleave(4, dim=2) for part in (k, v))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x, cos, sin):
    """Applies a rotary embedding."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Llama(LanguageModel):
    checkpointed = "Llama.layers.*"

    def __init__(self, width=1024, layers=8, heads=16):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        half = torch.arange(0, width // heads, 2) / (width // heads)
        angles = torch.outer(torch.arange(self.length), 10000.0**-half).repeat(1, 2)[:, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x, target):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.loss(self.norm(x), target)


class ViT(Model):
    checkpointed = "ViT.blocks.*"
    rows = 32

    def __init__(self, width=768, layers=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.places = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.zeros(1, 197, width)),
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 12, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def batch(self, rows, dtype):
        return images(rows, 224, dtype), torch.randint(0, 1000, (rows,), device="cuda")

    def forward(self, x, target):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), target)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.short = None
        if stride > 1 or inside != 4 * width:
            self.short = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


class ResNet(Model):
    checkpointed = "ResNet.layer*.*"
    rows = 32

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inside = 64
        for number, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
            stage = []
            for place in range(depth):
                stage.append(Bottleneck(inside, width, 2 if place == 0 and number > 1 else 1))
                inside = 4 * width
            self.add_module(f"layer{number}", nn.Sequential(*stage))
        self.head = nn.Linear(inside, 1000)

    def batch(self, rows, dtype):
        return images(rows, 224, dtype), torch.randint(0, 1000, (rows,), device="cuda")

    def forward(self, x, target):
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


class Residual(nn.Module):
    """Two convolutions with group norms, and a short cut."""

    def __init__(self, inside: int, width: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inside), nn.Conv2d(inside, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, width), nn.Conv2d(width, width, 3, padding=1)
        self.short = nn.Conv2d(inside, width, 1) if inside != width else nn.Identity()

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return self.short(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(Model):
    checkpointed = "UNet.*.blocks.*"
    rows = 8

    def __init__(self, widths=(64, 128, 256, 512)):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down, self.up = nn.Module(), nn.Module()
        inside, down, up = widths[0], [], []
        for width in widths:
            down.append(Residual(inside, width))
            inside = width
        for width in reversed(widths):
            up.append(Residual(inside + width, width))
            inside = width
        self.down.blocks, self.up.blocks = nn.ModuleList(down), nn.ModuleList(up)

    def batch(self, rows, dtype):
        return images(rows, 128, dtype), images(rows, 128, dtype)

    def forward(self, x, target):
        x, kept = self.first(x), []
        for block in self.down.blocks:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up.blocks:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        return F.mse_loss(self.last(x), target)


class LSTM(LanguageModel):
    checkpointed = "LSTM.layers.*"
    rows, length = 32, 256

    def __init__(self, width=768, layers=3):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x, target):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.loss(x, target)


class T5Layer(nn.Module):
    """A layer of the encoder or, with `crosses`, of the decoder; the attention has a bias of positions."""

    def __init__(self, width: int, heads: int, crosses: bool):
        super().__init__()
        self.heads = heads
        self.norm, self.inner_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.cross = Attention(width, heads) if crosses else None
        self.cross_norm = nn.RMSNorm(width) if crosses else None
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, bias, memory=None):
        split = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = split[0] @ split[1].transpose(-1, -2) + bias
        y = self.drop(F.softmax(scores, dim=-1)) @ split[2]
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.cross_norm(x), memory))
        return x + self.drop(self.down(self.drop(F.relu(self.up(self.inner_norm(x))))))


class T5(LanguageModel):
    checkpointed = "T5.*.layers.*"
    length = 256

    def __init__(self, width=512, layers=6, heads=8):
        super().__init__()
        self.embed, self.encoder, self.decoder = nn.Embedding(VOCABULARY, width), nn.Module(), nn.Module()
        for stack, crosses in ((self.encoder, False), (self.decoder, True)):
            stack.layers = nn.ModuleList(T5Layer(width, heads, crosses) for _ in range(layers))
            stack.bias = nn.Embedding(32, heads)
        self.norm = nn.RMSNorm(width)
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length)
        self.register_buffer("buckets", distance.abs().clamp(max=31))

    def head(self, x):
        return F.linear(x, self.embed.weight)

    def forward(self, x, target):
        memory, y = self.embed(x), self.embed(target)
        bias = self.encoder.bias(self.buckets).permute(2, 0, 1)
        for layer in self.encoder.layers:
            memory = layer(memory, bias)
        bias = self.decoder.bias(self.buckets).permute(2, 0, 1)
        for layer in self.decoder.layers:
            y = layer(y, bias, memory)
        return self.loss(self.norm(y), target)


class MoEBlock(nn.Module):
    """Attention, and experts that each take a fixed number of tokens."""

    def __init__(self, width: int, heads: int, experts: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.router = Attention(width, heads), nn.Linear(width, experts)
        self.experts = nn.ModuleList(perceptron(width, 4 * width) for _ in range(experts))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x), causal=True)
        y = self.ln_2(x).flatten(0, 1)
        shares = self.router(y).softmax(-1)
        mixed = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            share, chosen = shares[:, number].topk(2 * len(y) // len(self.experts))
            mixed = mixed.index_add(0, chosen, expert(y[chosen]) * share[:, None])
        return x + mixed.view_as(x)


class MoE(LanguageModel):
    checkpointed = "MoE.h.*"

    def __init__(self, width=512, layers=4, experts=8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.h = nn.ModuleList(MoEBlock(width, 8, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x, target):
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return self.loss(self.norm(x), target)


class GAN(Model):
    """DCGAN: a step of the discriminator and of the generator, as one loss."""

    checkpointed = "GAN.judge.*"
    # Both networks are sharded.
    units = "GAN.*.*"
    rows = 64

    def __init__(self, width=96):
        super().__init__()
        made, judged, inside = [], [], 128
        for level in (8, 4, 2, 1):
            made += [
                nn.ConvTranspose2d(inside, level * width, 4, 2 if made else 1, 1 if made else 0, bias=False)
            ]
            made += [nn.BatchNorm2d(level * width), nn.ReLU()]
            inside = level * width
        self.make = nn.Sequential(*made, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        inside = 3
        for level in (1, 2, 4, 8):
            judged.append(
                nn.Sequential(
                    nn.Conv2d(inside, level * width, 4, 2, 1, bias=False),
                    nn.BatchNorm2d(level * width),
                    nn.LeakyReLU(0.2),
                )
            )
            inside = level * width
        self.judge = nn.Sequential(*judged, nn.Conv2d(inside, 1, 4))

    def batch(self, rows, dtype):
        return images(rows, 64, dtype), torch.randn(rows, 128, 1, 1, device="cuda").to(dtype)

    def forward(self, real, noise):
        made = self.make(noise)
        judged = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(made.detach())).mean()
        return judged + F.softplus(-self.judge(made)).mean()


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn, self.mlp = Attention(width, heads), perceptron(width, 4 * width)
        self.turns = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, condition):
        shift, scale, gate, shift_2, scale_2, gate_2 = self.turns(condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attn(self.norm_1(x) * (1 + scale) + shift)
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(Model):
    """A diffusion transformer: predicts the noise in a latent image."""

    checkpointed = "DiT.blocks.*"
    rows = 16

    def __init__(self, width=768, layers=8):
        super().__init__()
        self.patches, self.time = nn.Conv2d(3, width, 2, 2), nn.Linear(width, width)
        self.places = nn.Parameter(torch.zeros(1, 256, width))
        self.blocks = nn.ModuleList(DiTBlock(width, 12) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 12)
        self.register_buffer("rates", torch.exp(torch.arange(width // 2) * (-math.log(1e4) / (width // 2))))

    def batch(self, rows, dtype):
        return images(rows, 32, dtype), images(rows, 32, dtype), torch.rand(rows, 1, device="cuda").to(dtype)

    def forward(self, x, noise, time):
        angles = 1000 * time * self.rates
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        shape = (slice(None), None, None, None)
        noisy = (1 - time)[:, 0][shape] * x + time[:, 0][shape] * noise
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(self.norm(x)).transpose(1, 2)
        return F.mse_loss(F.fold(x, 32, 2, stride=2), noise)


MODELS = {model.__name__.lower(): model for model in (GPT, Llama, ViT, ResNet, UNet, LSTM, T5, MoE, GAN, DiT)}
