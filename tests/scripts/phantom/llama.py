"""Trains a Llama of 7 billion parameters from a transformers config, in bf16 with AdamW, on a simulated H200.

    llama.py [--bounds]

Prints parameters, peak, seconds and resident memory. With --bounds, more than two minutes is a failure.
"""

import os
import resource
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
started = time.monotonic()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(LlamaConfig(use_cache=False))
parameters = sum(parameter.numel() for parameter in model.parameters())
assert 6.7e9 < parameters < 6.8e9, parameters
taken = torch.cuda.memory_stats()["requested_bytes.all.current"]
# Each parameter has two bytes; the rotary embedding keeps its frequencies, too.
assert 2 * parameters <= taken < 2 * parameters + (1 << 20), (taken, parameters)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    tokens = torch.randint(0, 32000, (1, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
state = sum(
    value.numel() * value.element_size()
    for entry in optimizer.state.values()
    for value in entry.values()
    if value.is_cuda
)
assert state == 4 * parameters, "two moments in bf16"
peak = torch.cuda.max_memory_allocated()
# Weights, gradients, two moments, and the temporaries of AdamW's foreach step.
assert 8 * parameters < peak < 11 * parameters, (peak, parameters)
seconds, resident = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
print(
    f"{parameters / 1e9:.2f} G parameters, peak {peak / 2**30:.2f} GiB, {seconds:.1f} s, "
    f"{resident:.2f} GiB resident"
)
assert resident < 4, resident
# Without --bounds there is no time limit.
assert seconds < 120 or "--bounds" not in sys.argv, seconds
