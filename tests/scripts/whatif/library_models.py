"""Small models of transformers and diffusers, from their configurations: nothing comes from the hub."""

from __future__ import annotations

import torch
from models import Model, images, tokens
from torch.nn import functional as F


class Library(Model):
    """A library's model, whose network takes its inputs by name."""

    def __init__(self):
        super().__init__()
        self.net = self.built()


class HFLlama(Library):
    checkpointed = "HFLlama.net.model.layers.*"

    def built(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def batch(self, rows, dtype):
        return (tokens(rows, 512),)

    def forward(self, text):
        return self.net(input_ids=text, labels=text).loss


class HFT5(Library):
    checkpointed = "HFT5.net.*.block.*"

    def built(self):
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=32000, num_layers=4, num_decoder_layers=4, use_cache=False, decoder_start_token_id=0
        )
        return T5ForConditionalGeneration(config)

    def batch(self, rows, dtype):
        return tokens(rows, 384), tokens(rows, 256)

    def forward(self, text, target):
        return self.net(input_ids=text, labels=target).loss


class HFViT(Library):
    checkpointed = "HFViT.net.vit.layers.*"
    rows = 24

    def built(self):
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            intermediate_size=2048,
            num_labels=1000,
        )
        return ViTForImageClassification(config)

    def batch(self, rows, dtype):
        return images(rows, 224, dtype), torch.randint(0, 1000, (rows,), device="cuda")

    def forward(self, pictures, labels):
        return self.net(pixel_values=pictures, labels=labels).loss


class SDUNet(Library):
    checkpointed = "SDUNet.net.*_blocks.*"
    rows = 8

    def built(self):
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(160, 320, 640, 640),
            layers_per_block=2,
            cross_attention_dim=768,
            attention_head_dim=8,
        )

    def batch(self, rows, dtype):
        made = {"device": "cuda", "dtype": dtype}
        return torch.randn(rows, 4, 32, 32, **made), torch.randn(rows, 77, 768, **made)

    def forward(self, latents, words):
        noise = torch.randn_like(latents)
        time = torch.randint(0, 1000, latents.shape[:1], device="cuda")
        return F.mse_loss(self.net(latents + noise, time, encoder_hidden_states=words).sample, noise)


MODELS = {model.__name__.lower(): model for model in (HFLlama, HFT5, HFViT, SDUNet)}
