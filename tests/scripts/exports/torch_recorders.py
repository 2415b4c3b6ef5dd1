"""Records a run with PyTorch's own tools, for a comparison with the exports of its trace.

    torch_recorders.py FOLDER

Trains a small net for a few steps, the third under torch.profiler. The run also has streams that hold freed
blocks, odd sizes, an OOM and a private pool. FOLDER gets the profiler's memory timelines and torch's final
snapshot. Nothing is freed after the snapshot.
"""

import contextlib
import os
import pickle
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

warnings.filterwarnings("ignore", category=FutureWarning)
folder = Path(sys.argv[1])
torch.cuda.init()
torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 700), nn.GELU(), nn.LayerNorm(700), nn.Linear(700, 30)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def step(number):
    torch.cuda.nvtx.mark(f"step:{number}")
    with torch.cuda.nvtx.range(f"step:{number}"):
        loss = model(torch.randn(33, 100, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


for number in range(2):
    step(number)
profiler = torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
)
with profiler:
    step(2)
profiler.export_memory_timeline(str(folder / "profiler.json"), "cuda:0")
profiler.export_memory_timeline(str(folder / "profiler.raw.json.gz"), "cuda:0")
step(3)

MIB = 1 << 20


def empty(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


kept = [empty(size) for size in (1, 513, MIB - 1, MIB + 1, 11 * MIB + 3, 30 * MIB)]
del kept[1], kept[2]
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    kept.append(empty(3 * MIB))
with contextlib.suppress(torch.cuda.OutOfMemoryError):
    empty(100 << 30)
torch.cuda.empty_cache()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kept.append(empty(5 * MIB + 7))
# Frees blocks that another stream still uses. No stream is waited for, so they stay active.
for size in (700, 2 * MIB, 13 * MIB):
    pending = empty(size)
    pending.record_stream(side)
    del pending
snapshot = torch.cuda.memory._snapshot()
stats = torch.cuda.memory_stats()
with open(folder / "torch.pickle", "wb") as file:
    pickle.dump({"snapshot": snapshot, "stats": dict(stats)}, file)
sys.stdout.flush()
os._exit(0)
