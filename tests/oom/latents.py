"""Trains a diffusion model with a frozen encoder, or in 16 bits: latents.py encoder|average [fix]."""

import os
import sys

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel, UNet2DModel
from diffusers.training_utils import EMAModel
from torch.nn import functional as F

KIND, FIX = sys.argv[1], "fix" in sys.argv
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


def average():
    """fp16 by autocast, AdamW and an average of the weights: the optimizer needs more than the card."""
    net = UNet2DConditionModel(
        sample_size=32, block_out_channels=(128, 256, 512, 512), cross_attention_dim=512, attention_head_dim=8
    ).cuda()
    average = EMAModel(net.parameters(), model_cls=UNet2DConditionModel, model_config=net.config)
    average.to("cuda")
    if FIX:
        net.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=FIX)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(STEPS):
        latents = torch.randn(16, 4, 32, 32, device="cuda")
        words = torch.randn(16, 77, 512, device="cuda")
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (16,), device="cuda")
        with torch.autocast("cuda", torch.float16):
            found = net(latents + noise, times, encoder_hidden_states=words).sample
            loss = F.mse_loss(found.float(), noise)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.step(net.parameters())


{f.__name__: f for f in (encoder, average)}[KIND]()
