"""Requests of odd sizes in random order: on two streams, in a graph's pool, and one that does not fit.

Prints the highest reserved bytes.
"""

import random

import torch

draw = random.Random(int(torch.__version__.split(".")[1]))
OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", RuntimeError)
side = torch.cuda.Stream()
live = []


def tensor(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


for step in range(6):
    for _ in range(200):
        size = int(2 ** draw.uniform(0, 26))
        with torch.cuda.stream(side if draw.random() < 0.2 else torch.cuda.current_stream()):
            live.append(tensor(size))
        while len(live) > 40:
            block = live.pop(draw.randrange(len(live)))
            # Marks one block in ten as used by `side`: it can be allocated again only when `side` has passed
            # this point.
            if draw.random() < 0.1:
                block.record_stream(side)
            del block
    if step == 2:
        torch.cuda.empty_cache()
    if step == 3:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = tensor(5_000_000)
            inside = tensor(70_000)
            del inside
        del kept, graph
        torch.cuda.empty_cache()
    if step == 4:
        try:
            tensor(64 << 30)
        except OUT_OF_MEMORY:
            print("a request ran out of memory")
print(torch.cuda.max_memory_reserved())
