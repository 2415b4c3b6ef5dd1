"""Loads and runs models of transformers and diffusers: serve.py KIND [fix].

KIND is load, beams, fraction, graphs or pipelines.
"""

import os
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))


def config(layers=8, **more):
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        max_position_embeddings=8192,
        **more,
    )


def load():
    """A checkpoint in bfloat16 that is loaded as float32."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config(16)).bfloat16().save_pretrained(folder)
        dtype = torch.bfloat16 if FIX else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda")
    with torch.no_grad():
        for _ in range(STEPS):
            model(torch.randint(0, 8192, (1, 128), device="cuda"), logits_to_keep=1)


def beams():
    """Beam search, whose cache has a part for each beam."""
    model = LlamaForCausalLM(config()).bfloat16().cuda().eval()
    for _ in range(STEPS):
        ids = torch.randint(3, 8192, (8, 1024), device="cuda")
        model.generate(
            ids,
            num_beams=1 if FIX else 8,
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
        )


def fraction():
    """A server that limits itself to a fraction of the card."""
    torch.cuda.set_per_process_memory_fraction(0.9 if FIX else 0.3)
    model = LlamaForCausalLM(config()).bfloat16().cuda().eval()
    for _ in range(STEPS):
        ids = torch.randint(3, 8192, (16, 512), device="cuda")
        model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)


def graphs():
    """A server that captures its model once for each batch size."""
    model = LlamaForCausalLM(config(4, use_cache=False)).cuda().eval()
    captured = []
    with torch.no_grad():
        for size in (32, 24, 16, 8, 4, 2, 1):
            ids = torch.zeros(size, 256, dtype=torch.long, device="cuda")
            model(ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=captured[0][0].pool() if FIX and captured else None):
                logits = model(ids, logits_to_keep=1).logits
            captured.append((graph, ids, logits))


def pipelines():
    """Builds a second pipeline while a variable still holds the first."""
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel

    def pipeline():
        unet = UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(128, 256, 512, 512),
            cross_attention_dim=512,
            attention_head_dim=8,
        )
        return {"unet": unet.cuda(), "vae": AutoencoderKL().cuda(), "scheduler": DDIMScheduler()}

    @torch.no_grad()
    def draw(pipe):
        pipe["scheduler"].set_timesteps(STEPS)
        latents = torch.randn(2, 4, 32, 32, device="cuda")
        words = torch.randn(2, 77, 512, device="cuda")
        for t in pipe["scheduler"].timesteps:
            noise = pipe["unet"](latents, t, encoder_hidden_states=words).sample
            latents = pipe["scheduler"].step(noise, t, latents).prev_sample
        return pipe["vae"].decode(latents).sample.cpu()

    base = pipeline()
    draw(base)
    if FIX:
        del base
    refiner = pipeline()
    draw(refiner)


{f.__name__: f for f in (load, beams, fraction, graphs, pipelines)}[KIND]()
