"""Programs rebuilt from reports of growing memory (README.md names them), for scripts/growth-corpus."""

from __future__ import annotations

import random

import torch
from common import DEVICE, STEPS, Steps, Trainer, args
from torch import nn


def torchmetrics_3294() -> Steps:
    """AveragePrecision keeps all predictions. Remedy: thresholds, which give its state a fixed size."""
    from torchmetrics import AveragePrecision

    trainer, head = Trainer(), nn.Linear(1024, 16).to(DEVICE)
    target = torch.randint(2, (65536, 16), device=DEVICE)
    thresholds = 100 if args.remedy else None
    metric = AveragePrecision("multilabel", num_labels=16, thresholds=thresholds, validate_args=False)
    metric.to(DEVICE)
    for _ in range(STEPS):
        with torch.no_grad():
            metric.update(torch.sigmoid(head(torch.randn(65536, 1024, device=DEVICE))), target)
        trainer.train(1024)
        yield


def ultralytics_730() -> Steps:
    """Assigns anchors to boxes; the image with the most boxes decides. Remedy: a limit on boxes."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.SiLU())]
    model = nn.Sequential(*layers)
    model, head = model.to(DEVICE), nn.Conv2d(32, 84, 1).to(DEVICE)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(3 * STEPS):
        boxes = 30 if args.remedy else int(random.paretovariate(1.5) * 20)
        scores = head(model(torch.randn(16, 32, 80, 80, device=DEVICE))).flatten(2)
        with torch.no_grad():
            corners = torch.rand(16, boxes, 1, 4, device=DEVICE)
            anchors = torch.rand(1, 1, scores.shape[2], 2, device=DEVICE)
            inside = torch.cat([anchors - corners[..., :2], corners[..., 2:] - anchors], -1).amin(-1)
            labels = torch.zeros(16, boxes, dtype=torch.long, device=DEVICE)
            picked = scores.gather(1, labels[..., None].expand(-1, -1, scores.shape[2]))
            aligned = picked.sigmoid() * inside.clamp_min(0).pow(6)
        loss = (scores * aligned.amax(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def softgroup_106() -> Steps:
    """Groups points to proposals; a better model makes more of them. Remedy: a limit on points."""
    trainer = Trainer()
    tiny = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64)).to(DEVICE)
    for step in range(2 * STEPS):
        grouped = 2000 if args.remedy else 2000 + 600 * step
        features = trainer.forward(4096)
        proposals = features[torch.randint(0, 4096, (grouped,), device=DEVICE)]
        trainer.finish(tiny(proposals).square().mean() + features.mean())
        yield


def llama_cookbook_792() -> Steps:
    """Each batch is padded to its longest text. Remedy: texts are cropped."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2 * STEPS):
        longest = max(int(random.lognormvariate(5.5, 0.7)) for _ in range(4))
        longest = min(longest, 384 if args.remedy else 4096)
        model(torch.randn(4, longest, 512, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


PROGRAMS = [torchmetrics_3294, ultralytics_730, softgroup_106, llama_cookbook_792]
