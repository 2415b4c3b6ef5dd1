"""Memory in pools of its own: pools.py graphs|mempool [fix]."""

import sys

import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8))
).cuda()


@torch.no_grad()
def graphs():
    made, pool = [], None
    for rows in (16384, 8192, 4096, 2048, 1024, 512):
        x = torch.randn(rows, 1024, device="cuda")
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool if FIX else None):
            out = model(x)
        pool = graph.pool()
        made.append((graph, x, out))
    for graph, _, _ in made:
        graph.replay()


@torch.no_grad()
def mempool():
    pool = torch.cuda.MemPool()
    for _ in range(3):
        with torch.cuda.use_mem_pool(pool):
            model(torch.randn(16384, 1024, device="cuda"))
    if FIX:
        del pool
    model(torch.randn(32768, 1024, device="cuda"))


{"graphs": graphs, "mempool": mempool}[KIND]()
