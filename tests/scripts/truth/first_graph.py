"""Captures a CUDA graph that allocates nothing, and marks a moment after it. No sample is due meanwhile."""

import time

import torch

x = torch.zeros(1 << 20, device="cuda")
time.sleep(0.3)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.add_(1)
time.sleep(0.3)
torch.cuda.nvtx.mark("after the graph")
time.sleep(0.3)
