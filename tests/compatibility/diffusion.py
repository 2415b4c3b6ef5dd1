"""Diffusers: diffusion.py unet (training) | pipeline (Stable Diffusion's) | flux (a transformer's step)."""

import sys

import torch
from diffusers import AutoencoderKL, DDIMScheduler, FluxTransformer2DModel, UNet2DConditionModel, UNet2DModel
from peaks import print_peak


def unet():
    model = UNet2DModel(
        sample_size=64,
        block_out_channels=(64, 128),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        noise = torch.randn(4, 3, 64, 64, device="cuda")
        model(noise, torch.randint(0, 1000, (4,)).cuda()).sample.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def pipeline():
    denoiser = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128),
        layers_per_block=1,
        cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    ).cuda()
    decoder = AutoencoderKL(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).cuda()
    schedule = DDIMScheduler()
    schedule.set_timesteps(4)
    latents = torch.randn(2, 4, 32, 32, device="cuda")
    for moment in schedule.timesteps:
        noise = denoiser(latents, moment, torch.randn(2, 16, 64, device="cuda")).sample
        latents = schedule.step(noise, moment, latents).prev_sample
    print(tuple(decoder.decode(latents).sample.shape))


def flux():
    model = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        in_channels=16,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=True,
    ).cuda()
    out = model(
        torch.randn(1, 256, 16).cuda(),
        torch.randn(1, 32, 64).cuda(),
        torch.randn(1, 64).cuda(),
        torch.ones(1).cuda(),
        torch.zeros(256, 3).cuda(),
        torch.zeros(32, 3).cuda(),
        torch.ones(1).cuda(),
    ).sample
    out.square().mean().backward()


torch.manual_seed(0)
globals()[sys.argv[1]]()
print("done")
print_peak()
