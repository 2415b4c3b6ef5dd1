"""Opens ranges of every kind; tests/tracer/torch.rs checks their rows."""

import torch
from torch.cuda import nvtx

KEPT = []


def take(count):
    """Allocates a block of a unique size, by which the test finds its row."""
    KEPT.append(torch.empty(count * 512, dtype=torch.uint8, device="cuda"))


torch.cuda.init()
take(101)  # before any range
nvtx.range_push("forward")
take(102)
nvtx.range_push("encoder")
nvtx.range_push("layer.0")
take(103)
nvtx.range_pop()
take(104)
nvtx.range_pop()
nvtx.range_push("module:GPT.h.3")
nvtx.range_push("mlp")
take(105)
nvtx.range_pop()
nvtx.range_pop()
nvtx.range_pop()
take(106)  # after all ranges
handle = nvtx.range_start("optimizer")
take(107)
nvtx.mark('here: a mark, with a comma and "quotes"')
nvtx.range_end(handle)
with nvtx.range("step 7"), nvtx.range("phase:warm up"), nvtx.range("op:fused_thing"):
    take(108)
take(109)

# Autograd allocates on its own thread, which has the phase and the step of the process.
weight = torch.ones(256, 512, device="cuda", requires_grad=True)
with nvtx.range("step 8"):
    with nvtx.range("forward"):
        loss = (weight * 2.0).sum()
    with nvtx.range("backward"):
        loss.backward()
nvtx.mark("end")
