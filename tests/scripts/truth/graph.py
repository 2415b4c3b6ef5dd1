"""Compared with torch: a CUDA graph and a MemPool, which allocate from private pools."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
from checkpoints import checkpoint


def net(x):
    return (x @ x).relu().sum(0)


x = torch.zeros(512, 512, device="cuda")
warm = torch.cuda.Stream()
with torch.cuda.stream(warm):
    net(x)
torch.cuda.synchronize()
checkpoint("warm")
first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(first):
    kept = net(x)
checkpoint("captured")
with torch.cuda.graph(second, pool=first.pool()):
    more = net(x) + 1
checkpoint("captured in the same pool")
first.replay()
second.replay()
checkpoint("replayed")
outside = torch.empty(3 << 20, device="cuda")
checkpoint("outside")
# The graphs' pool is released with the last graph. (No reset(): in torch 2.1 the destructor repeats it and
# crashes.)
del kept, more, first, second
checkpoint("graphs gone")
torch.cuda.empty_cache()
checkpoint("emptied")

if hasattr(torch.cuda, "MemPool"):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (5, 700_000, 5_000_000)]
    checkpoint("in a MemPool")
    outside = torch.empty(100, device="cuda")
    inside.pop()
    checkpoint("one freed")
    del inside, pool
    checkpoint("pool gone")
    torch.cuda.empty_cache()
    checkpoint("pool emptied")
print("done", torch.cuda.max_memory_allocated())
