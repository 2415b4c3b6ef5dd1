"""Cut Cross-Entropy's baseline: a linear layer and cross entropy, the head of Gemma 2 2B, bf16, 8192 tokens.

The figures are differences of peaks: for the loss, for its gradient, and for both. Gemma 2 caps its logits.
"""

import gc

import torch
from harness import figure

TOKENS, VOCABULARY, HIDDEN, CAP = 8192, 256000, 2304, 30.0


def baseline(e, c, targets):
    logits = e @ c.T
    logits = torch.tanh(logits / CAP) * CAP
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def measured(e, c, targets, forward, backward):
    e.grad = c.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    loss = baseline(e, c, targets)
    after = torch.cuda.max_memory_allocated()
    if not forward:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
    if backward:
        loss.backward()
        after = torch.cuda.max_memory_allocated()
    return after - before


kind = {"device": "cuda", "dtype": torch.bfloat16}
embedding = torch.randn(TOKENS, HIDDEN, **kind).requires_grad_()
classifier = torch.randn(VOCABULARY, HIDDEN, **kind).requires_grad_()
targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
for repetition in range(2):  # The first repetition is a warm-up.
    for label, forward, backward in (("loss", True, False), ("gradient", False, True), ("both", True, True)):
        size = measured(embedding, classifier, targets, forward, backward)
        if repetition:
            figure(label, allocated=size)
