"""Segments volumes by a sliding window: windows.py [fix].

MONAI's sliding_window_inference in CLIP-Driven-Universal-Model#55: the scores of all classes for a whole
volume are collected on the GPU. The fix collects them on the CPU.
"""

import os
import sys

import torch
from torch import nn

FIX = "fix" in sys.argv
WINDOW = 64
model = nn.Sequential(
    nn.Conv3d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv3d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv3d(16, 32, 1),
)
model = model.cuda().eval()


def segment(volume):
    depth, height, width = volume.shape[2:]
    device = "cpu" if FIX else "cuda"
    scores = torch.zeros(1, 32, depth, height, width, device=device)
    counts = torch.zeros(1, 1, depth, height, width, device=device)
    for z in range(0, depth, WINDOW):
        for y in range(0, height, WINDOW):
            for x in range(0, width, WINDOW):
                part = (..., slice(z, z + WINDOW), slice(y, y + WINDOW), slice(x, x + WINDOW))
                scores[part] += model(volume[part]).to(device)
                counts[part] += 1
    return scores / counts


with torch.no_grad():
    for size in [128, 128, 192, 320][: int(os.environ.get("STEPS", 4))]:
        volume = torch.randn(1, 1, 192, size, size, device="cuda")
        segment(volume)
