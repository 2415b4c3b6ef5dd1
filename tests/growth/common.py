"""Code shared by the programs of the growth corpus: PyTorch's figures, a model, and its training."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
from collections.abc import Iterator

import torch
from torch import nn

Steps = Iterator[None]  # a program yields once after each of its steps
MIB = 1 << 20
STEPS = 40 * int(os.environ.get("TIMES", "1"))  # scripts/growth-corpus runs longer to check a forecast
DEVICE = "cuda"
args = argparse.Namespace(remedy=False)
kept: list = []
random.seed(7)


def level() -> None:
    """Prints PyTorch's figures of a finished step."""
    free, total = torch.cuda.mem_get_info()
    figures = {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": total - free,
    }
    torch.cuda.reset_peak_memory_stats()
    print("LEVEL", json.dumps(figures), flush=True)


def mlp(width: int = 1024, depth: int = 4) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).to(DEVICE)


@contextlib.contextmanager
def marked(step: int) -> Iterator[None]:
    """Marks a step with its number, for a program without an optimizer."""
    torch.cuda.nvtx.range_push(f"step:{step}")
    yield
    torch.cuda.nvtx.range_pop()


class Trainer:
    """A model, its optimizer, and a step of training."""

    def __init__(self, model: nn.Module | None = None, width: int = 1024) -> None:
        self.width = width
        self.model = model or mlp(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def forward(self, rows: int) -> torch.Tensor:
        return self.model(torch.randn(rows, self.width, device=DEVICE))

    def finish(self, loss: torch.Tensor, **options: bool) -> None:
        self.optimizer.zero_grad()
        loss.backward(**options)
        self.optimizer.step()

    def train(self, rows: int = 2048) -> torch.Tensor:
        out = self.forward(rows)
        self.finish(out.square().mean())
        return out
