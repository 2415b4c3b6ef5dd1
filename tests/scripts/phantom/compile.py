"""Runs torch.compile with inductor and Triton on the simulated GPU.

TRITON_LIBCUDA_PATH names a folder with libcuda.so.1.
"""

import torch
import torch.nn as nn

torch.set_float32_matmul_precision("high")
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
compiled = torch.compile(model)
for _ in range(3):
    loss = compiled(torch.randn(64, 256, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert loss.item() == 0.0
explained = torch._dynamo.utils.counters["stats"]
assert explained["unique_graphs"] == 1, explained


# A Triton kernel with its autotuner, which decides by device time: the same in every run.
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def add(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(a + at, mask=at < n) + tl.load(b + at, mask=at < n), mask=at < n)


a, b = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
out = torch.empty_like(a)
add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](a, b, out, 1000)
print("chosen", add.best_config)


@triton.jit
def cap(counts, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    count = tl.load(counts + at)
    tl.store(counts + at, tl.where(count > 100, 0, count))


# The kernel computes no values, so a count that it may have rewritten is read as it was.
counts = torch.ones(4, dtype=torch.int32, device="cuda")
cap[(1,)](counts, 4)
assert counts.tolist() == [1, 1, 1, 1]

# Compiled code that is captured into CUDA graphs and replayed.
layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
graphed = torch.compile(layers, mode="reduce-overhead")
for _ in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    graphed(torch.randn(8, 64, device="cuda")).sum().backward()
    # The gradients are in the memory of the graph, which the next step overwrites.
    layers.zero_grad(set_to_none=True)
assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
assert any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in torch.cuda.memory_snapshot())
print("ok")
