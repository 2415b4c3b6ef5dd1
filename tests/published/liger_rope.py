"""Liger-Kernel: rotary position embedding in bf16, 32 query heads and 8 of keys.

`--variant llama4` multiplies complex numbers, as Llama 4 does.
"""

import sys

import torch
from harness import figure
from harness.liger import peak, sweep
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

HIDDEN_SWEEP = "--H" in sys.argv


def case(value, arguments):
    hidden, length = (value, arguments.length) if HIDDEN_SWEEP else (arguments.hidden, value)
    head = hidden // 32
    llama4 = arguments.variant == "llama4"
    shapes = (1, length, 32, head), (1, length, 8, head)
    q, k = (torch.randn(s, device="cuda", requires_grad=True, dtype=torch.bfloat16) for s in shapes)
    if not llama4:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    inverse = 1.0 / (10000.0 ** (torch.arange(0, head, 2, device="cuda").float() / head))
    angles = positions[0, :, None].float() @ inverse[None, :]
    if llama4:
        turns = (torch.polar(torch.ones_like(angles), angles)[None],)
    else:
        both = torch.cat((angles, angles), dim=-1)[None]
        turns = both.cos().to(torch.bfloat16), both.sin().to(torch.bfloat16)
        del both
    del angles

    def full():
        q_out, k_out = (apply_rotary_emb if llama4 else apply_rotary_pos_emb)(q, k, *turns)
        torch.autograd.grad((q_out, k_out), (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    figure(f"{'H' if HIDDEN_SWEEP else 'T'}={value}", allocated=peak(full))


sweep("H" if HIDDEN_SWEEP else "T", case, length=2048, hidden=8192)
