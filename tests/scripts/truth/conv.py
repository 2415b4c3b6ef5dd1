"""Compared with torch: a residual convolutional net with mixed precision, batch norm and gradient scaling."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
from checkpoints import checkpoint


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3, bias=False),
    nn.MaxPool2d(3, 2, 1),
    Residual(64, 64, 1),
    Residual(64, 128, 2),
    Residual(128, 256, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(256, 1000),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.cuda.amp.GradScaler() if torch.__version__ < "2.3" else torch.amp.GradScaler("cuda")
checkpoint("built")
for step in range(3):
    # Batch sizes differ, so blocks are split and the cache fragments.
    images = torch.randn(16 + step, 3, 128, 128).pin_memory().cuda(non_blocking=True)
    labels = torch.randint(1000, (16 + step,)).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels)
    checkpoint("forward")
    scaler.scale(loss).backward()
    checkpoint("backward")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    checkpoint("step")
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
