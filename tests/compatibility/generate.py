"""Generation with Transformers: generate.py dynamic|static|offloaded|beams."""

import sys

import torch
from peaks import print_peak
from transformers import LlamaConfig, LlamaForCausalLM

HOW = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "beams": {"num_beams": 4},
}
torch.manual_seed(0)
kind = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(kind).to(torch.bfloat16).cuda().eval()
model.generation_config.pad_token_id = 0
ids = torch.randint(3, 1024, (4, 64), device="cuda")
out = model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, **HOW[sys.argv[1]])
print(tuple(out.shape))
print_peak()
