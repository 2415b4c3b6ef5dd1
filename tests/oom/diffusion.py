"""Trains or runs models of diffusers: diffusion.py unet|vae|ema BATCH [fix]."""

import copy
import os
import sys

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

KIND, BATCH, FIX = sys.argv[1], int(sys.argv[2]), "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 3))


def unet():
    net = UNet2DConditionModel(
        sample_size=32, block_out_channels=(128, 256, 512, 512), cross_attention_dim=512, attention_head_dim=8
    ).cuda()
    if FIX and KIND == "unet":
        net.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(net.parameters())
    versions = []
    for _ in range(STEPS):
        latents = torch.randn(BATCH, 4, 32, 32, device="cuda")
        words = torch.randn(BATCH, 77, 512, device="cuda")
        times = torch.randint(0, 1000, (BATCH,), device="cuda")
        loss = net(latents, times, encoder_hidden_states=words).sample.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if KIND == "ema":
            versions.append(copy.deepcopy(net).to("cpu" if FIX else "cuda"))


def vae():
    net = AutoencoderKL(
        block_out_channels=(64, 128, 256, 256),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=512,
    ).cuda()
    if FIX:
        net.enable_tiling()
    with torch.no_grad():
        for _ in range(STEPS):
            net.decode(torch.randn(BATCH, 4, 256, 256, device="cuda"))


vae() if KIND == "vae" else unet()
