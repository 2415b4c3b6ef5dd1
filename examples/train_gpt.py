"""Trains a small GPT on random tokens: the example of scripts/quickstart and of the README.

An ordinary script. It knows nothing of memtrace; its NVTX ranges are the ones that people put in for
Nsight, and memtrace reads them as phases, steps and modules.
"""

import argparse

import torch
from torch import nn
from torch.cuda import nvtx
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, context, width = x.shape
        split = (batch, context, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        with nvtx.range("attn"):
            x = x + self.attn(self.ln1(x))
        with nvtx.range("mlp"):
            return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=50304, context=1024, width=768, heads=12, layers=12):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        with nvtx.range("GPT"):
            with nvtx.range("embed"):
                x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for index, block in enumerate(self.h):
                with nvtx.range(f"h.{index}"):
                    x = block(x)
            with nvtx.range("head"):
                logits = self.head(self.ln(x))
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, optimizer, vocabulary, context, batch, steps, after_step=lambda step: None):
    for step in range(steps):
        with nvtx.range(f"step {step}"):
            tokens = torch.randint(vocabulary, (batch, context)).cuda()
            targets = torch.randint(vocabulary, (batch, context)).cuda()
            with nvtx.range("forward"):
                loss = model(tokens, targets)
            with nvtx.range("backward"):
                loss.backward()
            with nvtx.range("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        after_step(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    with nvtx.range("init"), torch.device("cuda"):
        model = GPT(args.vocabulary, args.context, args.width, args.heads, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    print(f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")

    def report(step):
        print(f"step {step}: peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB", flush=True)

    train(model, optimizer, args.vocabulary, args.context, args.batch, args.steps, report)


if __name__ == "__main__":
    main()
