"""Uses the backend `cudaMallocAsync`.

At each point it prints torch's figures of the pool, and makes the tracer sample the device.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))
import memtrace  # noqa: E402

held = []
for point in range(12):
    held += [torch.empty(512 * (7 * point + i + 1), dtype=torch.uint8, device="cuda") for i in range(5)]
    if point % 3 == 2:
        held = held[::2]
        torch.cuda.synchronize()
    if point == 8:
        held.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
    if point == 10:
        held = held[:-1]
        torch.cuda.empty_cache()
    memtrace.flush()
    memtrace.mark(f"point {point}")
    stats = torch.cuda.memory_stats()
    print(
        stats["reserved_bytes.all.current"],
        stats["allocated_bytes.all.current"],
        sum(tensor.numel() for tensor in held),
        flush=True,
    )

# Captures a graph. Its allocations and frees become nodes, and the graph owns the memory from its first
# launch on.
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    gone = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    del gone
memtrace.mark("captured")
graph.replay()
graph.replay()
memtrace.flush()
