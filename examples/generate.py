"""Generates text. The key-value cache grows with each token.

memtrace run --phantom h100-80g -o out -- python examples/generate.py
memtrace timeline out
memtrace peak --by module --depth 3 out
"""

import memtrace
import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8)).cuda().eval()
prompt = torch.zeros(8, 32, dtype=torch.long, device="cuda")
# Names the phase. The call does nothing if the script is not traced.
with memtrace.phase("generate"):
    model.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)
print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
