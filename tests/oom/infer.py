"""Runs models without training them: infer.py embeddings|sessions|features|sample|images|eager [fix]."""

import os
import sys

import torch

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 20))
kept = []


def llama(attention="sdpa", layers=6):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=16384,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).cuda().eval()


def embeddings():
    """Keeps the embeddings of a corpus with their autograd graphs, which nobody needs."""
    model = llama().model
    with torch.set_grad_enabled(not FIX):
        for _ in range(STEPS):
            words = torch.randint(0, 8192, (4, 128), device="cuda")
            kept.append(model(words, use_cache=False).last_hidden_state.mean(1))


def sessions():
    """A chat server that keeps the key-value cache of every session."""
    model = llama()
    with torch.no_grad():
        for _ in range(STEPS):
            words = torch.randint(0, 8192, (1, 2048), device="cuda")
            kept.append(model(words, use_cache=True, logits_to_keep=1).past_key_values)
            if FIX:
                kept.clear()


def features():
    """Keeps a bank of timm's feature maps."""
    import timm

    model = timm.create_model("resnet18", features_only=True).cuda().eval()
    with torch.no_grad():
        for _ in range(STEPS):
            maps = model(torch.randn(16, 3, 224, 224, device="cuda"))
            kept.append([each.cpu() for each in maps] if FIX else maps)


def sample():
    """Denoising steps whose graph reaches back to the first."""
    from diffusers import DDIMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, block_out_channels=(64, 128, 128, 256)
    ).cuda()
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    with torch.set_grad_enabled(not FIX):
        images = torch.randn(4, 3, 64, 64, device="cuda")
        for t in scheduler.timesteps:
            images = scheduler.step(model(images, t).sample, t, images).prev_sample


def images():
    """Decoded images that wait on the GPU to be saved."""
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny().cuda()
    with torch.no_grad():
        for _ in range(STEPS):
            pictures = model.decode(torch.randn(4, 4, 64, 64, device="cuda")).sample
            kept.append(pictures.cpu() if FIX else pictures)


def eager():
    """Attention that writes out its scores, over a long text."""
    model = llama("sdpa" if FIX else "eager", layers=2)
    with torch.no_grad():
        model(torch.randint(0, 8192, (1, 12288), device="cuda"), use_cache=False, logits_to_keep=1)


{f.__name__: f for f in (embeddings, sessions, features, sample, images, eager)}[KIND]()
