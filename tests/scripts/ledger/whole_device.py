"""Allocates device memory of every kind, and prints the device's figures; the ledger must add up.

The first line has the bytes that the program holds, then total and free of cudaMemGetInfo.
"""

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))
import memtrace  # noqa: E402

MIB = 1 << 20
cuda = ctypes.CDLL(None)


def take(name, *arguments):
    pointer = ctypes.c_void_p()
    status = getattr(cuda, name)(ctypes.byref(pointer), *arguments)
    assert status == 0, (name, status)
    return pointer


size = ctypes.c_size_t
model = torch.nn.Linear(2048, 2048, device="cuda")  # 16 MiB and 8 KiB
loss = model(torch.ones(64, 2048, device="cuda")).sum()
loss.backward()
gone = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
del gone  # cached and free
odd = torch.empty(30 * MIB + 1, dtype=torch.uint8, device="cuda")
pinned = torch.empty(MIB, pin_memory=True)
# ctypes calls these functions through libffi, so the trace names libffi as the library that allocated.
plain = take("cudaMalloc", size(300 * MIB))
driver = take("cuMemAlloc_v2", size(40 * MIB))
pooled = take("cuMemAllocAsync", size(10 * MIB), None)
managed = take("cudaMallocManaged", size(500 * MIB), 1)
if torch.cuda.is_available() and hasattr(cuda, "cuMemCreate"):
    properties = (ctypes.c_int * 8)(1, 0, 1, 0)
    physical = take("cuMemCreate", size(64 * MIB), properties, ctypes.c_ulonglong(0))
# A graph that holds 8 MiB once it is launched; a node of the graph frees 3 MiB of them.
stream, graph, ready = take("cudaStreamCreate"), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cudaStreamBeginCapture(stream, 2) == 0
captured = [take("cudaMallocAsync", size(n * MIB), stream) for n in (5, 3)]
assert cuda.cudaFreeAsync(captured.pop(), stream) == 0
assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
assert cuda.cudaGraphInstantiate(ctypes.byref(ready), graph, ctypes.c_ulonglong(0)) == 0
assert cuda.cudaGraphLaunch(ready, stream) == 0
memtrace.flush()
free, total = torch.cuda.mem_get_info()
stats = torch.cuda.memory_stats()
print(total, free, stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"], flush=True)
memtrace.mark("counted")
