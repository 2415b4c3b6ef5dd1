"""Halves the critic's batch after an OOM; the generator's graph is needed throughout: critic.py [fix]."""

import os
import sys

import torch
from torch import nn

FIX = "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 3))


def net(channels, width, depth, out):
    layers = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, out, 3, padding=1))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net(3, 64, 8, 3)

    def forward(self, x):
        return self.body(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net(3, 64, 6, 1)

    def forward(self, x):
        return self.body(x).mean()


generator, critic = Generator().cuda(), Discriminator().cuda()
g_optimizer, d_optimizer = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
size = 16
for _ in range(STEPS):
    noise = torch.randn(8 if FIX else 32, 3, 128, 128, device="cuda")
    real = torch.rand(32, 3, 128, 128, device="cuda")
    fake = generator(noise)
    while True:
        try:
            for part in real.split(size):
                critic(part).neg().backward()
            break
        except torch.OutOfMemoryError:
            if size <= 4:
                raise
        d_optimizer.zero_grad()
        size //= 2
    d_optimizer.step()
    d_optimizer.zero_grad()
    for part in fake.split(size):
        critic(part).neg().backward(retain_graph=True)
    g_optimizer.step()
    g_optimizer.zero_grad()
    del fake, part
