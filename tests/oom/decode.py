"""Generates text with a cache of keys and values: decode.py generate|loop [fix]."""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 1))


def generate():
    """An encoder and a decoder, whose layers each cache two sets of keys and values."""
    config = T5Config(
        vocab_size=8192, d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=8, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).cuda().eval()
    ids = torch.randint(2, 8192, (32 if FIX else 96, 512), device="cuda")
    for _ in range(STEPS):
        model.generate(input_ids=ids, max_new_tokens=96, min_new_tokens=96, do_sample=False)


@torch.no_grad()
def loop():
    """A loop that decodes one token at a time."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = LlamaForCausalLM(config).cuda().eval()
    for _ in range(STEPS):
        ids, past = torch.randint(0, 8192, (8 if FIX else 24, 512), device="cuda"), None
        for _ in range(64):
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            ids, past = result.logits[:, -1:].argmax(-1), result.past_key_values


{f.__name__: f for f in (generate, loop)}[KIND]()
