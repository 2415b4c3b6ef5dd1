"""Ranges of the PyPI package `nvtx`, alone and mixed with torch's; and torch's emit_nvtx."""

import nvtx
import torch

KEPT = []


def take(count):
    """Allocates a block of a unique size, by which the test finds its row."""
    KEPT.append(torch.empty(count * 512, dtype=torch.uint8, device="cuda"))


torch.cuda.init()
with nvtx.annotate("forward"):
    take(201)
with nvtx.annotate("GPT.h.1", domain="memtrace", category="module"):
    take(202)
with nvtx.annotate("12", domain="memtrace", category="step"):
    take(203)
handle = nvtx.start_range("backward")
take(204)
nvtx.end_range(handle)
# The package's default domain and torch's ranges share a stack.
with torch.cuda.nvtx.range("outer"), nvtx.annotate("inner"):
    take(205)
with nvtx.annotate("phase:évaluation", domain="my library", payload=7):
    take(206)
nvtx.mark("a mark of the package")
with torch.autograd.profiler.emit_nvtx():
    take(207)
