"""Liger-Kernel: nn.Embedding in fp32, 16384 tokens.

The benchmark of speed ran first in the same process, and torch.compile kept each module that it compiled,
with its gradient. Here these tensors are simply kept. The published rows show them: a sweep of compiled
modules of width 4096 adds 4080 MiB of weights, and as much of gradients.
"""

import torch
from harness import figure
from harness.liger import peak, sweep

SIZES = [2**power for power in range(10, 18)]


def kept(width, copies):
    """Returns tensors as large as the modules' weights or gradients, for each vocabulary."""
    return [torch.empty(V, width, device="cuda") for V in SIZES for _ in range(copies)]


# Width 4096: the weights of the forward benchmark, and the weights and gradients of the benchmark of both
# passes.
HELD = kept(4096, 3)


def case(V, arguments):
    if arguments.width == 4096 and len(HELD) == 3 * len(SIZES):
        HELD.extend(kept(768, 2))  # The memory benchmark of width 768 came before.
    embedding = torch.nn.Embedding(V, arguments.width).to("cuda")
    liger = torch.nn.Embedding(V, arguments.width).to("cuda")  # noqa: F841 - Liger's layer stays allocated
    ids = torch.randint(0, V, (arguments.batch, 16384 // arguments.batch), device="cuda")

    def full():
        output = embedding(ids)
        output.backward(torch.randn_like(output))

    figure(f"V={V}", allocated=peak(full))


sweep("V", case, again=False, width=768, batch=32)
