"""Trains a vision transformer on random pictures: the script of docs/tutorial.md.

It runs out of memory twice on a 24 GB card, in training and in validation. --checkpoint and --no-grad fix it.
"""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self, width=1024, heads=16, layers=24, patch=16, size=224, classes=1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.checkpoint = False

    def forward(self, pictures):
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(self.ln(x).mean(dim=1))


def loss_of(model, batch):
    pictures = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (batch,), device="cuda")
    return nn.functional.cross_entropy(model(pictures), labels)


def validate(model, batch, batches=20):
    total = 0
    for _ in range(batches):
        total += loss_of(model, batch)
    return total / batches


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in backward")
    parser.add_argument("--no-grad", action="store_true", help="validate without gradients")
    args = parser.parse_args()

    model = ViT().cuda()
    model.checkpoint = args.checkpoint
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        loss = loss_of(model, args.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
    with torch.set_grad_enabled(not args.no_grad):
        validate(model, args.batch)
    print(f"validated: peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
