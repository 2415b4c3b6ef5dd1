"""Trains an image tower and a text tower with the loss of CLIP: contrast.py BATCH [fix]."""

import os
import sys

import timm
import torch
from torch import nn
from torch.nn import functional as F

BATCH, FIX = int(sys.argv[1]), "fix" in sys.argv


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = timm.create_model("vit_small_patch16_224", num_classes=256)
        self.image.set_grad_checkpointing(FIX)
        self.words = nn.Embedding(8192, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 4)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images, ids):
        images = F.normalize(self.image(images), dim=-1)
        texts = F.normalize(self.text(self.words(ids)).mean(1), dim=-1)
        return self.scale.exp() * images @ texts.T


model = Clip().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
labels = torch.arange(BATCH, device="cuda")
for _ in range(int(os.environ.get("STEPS", 3))):
    logits = model(
        torch.randn(BATCH, 3, 224, 224, device="cuda"), torch.randint(0, 8192, (BATCH, 64), device="cuda")
    )
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
