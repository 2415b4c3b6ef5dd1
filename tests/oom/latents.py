"""Trains a diffusion model with a frozen encoder: latents.py [fix]."""

import os
import sys

import torch
from diffusers import AutoencoderKL, UNet2DModel
from torch.nn import functional as F

FIX = "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 3))


def encoder():
    """A frozen encoder without eval() and no_grad(): its graph lives until the end of the step."""
    vae = AutoencoderKL(
        block_out_channels=(64, 128, 128, 128),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    ).cuda()
    net = UNet2DModel(32, 4, 4, block_out_channels=(128, 256, 256, 256)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for _ in range(STEPS):
        images = torch.randn(8, 3, 256, 256, device="cuda")
        with torch.set_grad_enabled(not FIX):
            latents = vae.encode(images).latent_dist.mode()
        noise = torch.randn_like(latents)
        found = net(latents + noise, torch.randint(0, 1000, (8,), device="cuda")).sample
        F.mse_loss(found, noise).backward()
        optimizer.step()
        optimizer.zero_grad()


encoder()
