"""Trains or runs a Llama of transformers: llama.py KIND BATCH TOKENS VOCABULARY [fix].

KIND is train, bf16 (the model is in bfloat16), adamw, autocast, lengths or evaluate.
"""

import os
import sys

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

KIND, FIX = sys.argv[1], "fix" in sys.argv
BATCH, TOKENS, VOCABULARY = map(int, sys.argv[2:5])
STEPS = int(os.environ.get("STEPS", 3))
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=65536,
    use_cache=False,
)
model = LlamaForCausalLM(config).cuda()
if KIND == "bf16":
    model = model.bfloat16()
if FIX and KIND in ("train", "lengths", "autocast"):
    model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), fused=FIX and KIND == "adamw")


def train(tokens):
    with torch.autocast("cuda", torch.bfloat16, enabled=KIND == "autocast"):
        if FIX and KIND == "bf16":  # the logits of 256 tokens at a time
            hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
            parts = zip(hidden.split(256), tokens.flatten().split(256), strict=True)
            loss = sum(checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts)
        else:
            loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def chunk_loss(hidden, words):
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), words)


def text(rows, tokens):
    return torch.randint(0, VOCABULARY, (rows, tokens), device="cuda")


for step in range(STEPS):
    if KIND == "evaluate":
        model.eval()
        with torch.set_grad_enabled(not FIX):
            print(model(input_ids=text(BATCH, TOKENS), labels=text(BATCH, TOKENS)).loss.item())
    elif KIND == "lengths":
        train(text(BATCH, TOKENS * (1, 1, 4, 1, 2, 1)[step % 6]))
    else:
        train(text(BATCH, TOKENS))
