"""Trains a GPT of plain PyTorch: gpt.py BATCH WIDTH LAYERS VOCABULARY [one] [fix | fused | 8bit | small].

`one` checkpoints all blocks as one, `fix` each block; `fused` and `8bit` choose the optimizer; `small` takes
a quarter of the batch.
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH, LAYERS, VOCABULARY = map(int, sys.argv[1:5])
MODE = sys.argv[5:]
BATCH //= 4 if "small" in MODE else 1


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def stack(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "fix" in MODE else block(x)
        return x

    def forward(self, tokens):
        x = self.embed(tokens)
        x = (
            checkpoint(self.stack, x, use_reentrant=False)
            if "one" in MODE and "fix" not in MODE
            else self.stack(x)
        )
        return self.head(x)


model = GPT().cuda()
if "8bit" in MODE:
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(model.parameters())
else:
    optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in MODE)
for _ in range(int(os.environ.get("STEPS", 4))):
    tokens = torch.randint(0, VOCABULARY, (BATCH, 256), device="cuda")
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
