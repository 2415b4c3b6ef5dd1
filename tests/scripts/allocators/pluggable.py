"""Replaces torch's allocator with one written in C, or puts that one behind a MemPool.

pluggable.py current   every tensor is a block; the C allocator does its own counting
pluggable.py pool      a MemPool takes its segments from the C allocator; torch's statistics count them
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = """
#include <stddef.h>
#include <sys/types.h>
int cudaMalloc(void **, size_t);
int cudaFree(void *);
static long held, given, taken;
void *allocate(ssize_t size, int device, void *stream) {
    void *address = NULL;
    if (cudaMalloc(&address, size)) return NULL;
    held += size, given++;
    return address;
}
void give_back(void *address, ssize_t size, int device, void *stream) {
    held -= size, taken++;
    cudaFree(address);
}
long held_bytes(void) { return held; }
long calls(void) { return given * 1000 + taken; }
"""

how = sys.argv[1] if len(sys.argv) > 1 else "current"
if how == "pool" and not hasattr(torch.cuda, "MemPool"):
    print("no MemPool")
    sys.exit()
with tempfile.TemporaryDirectory() as folder:
    source, library = Path(folder) / "mine.c", Path(folder) / "libmine.so"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "allocate", "give_back")
    mine = ctypes.CDLL(str(library))
    mine.held_bytes.restype = mine.calls.restype = ctypes.c_long

    if how == "current":
        torch.cuda.is_available()  # many scripts ask first, so torch's own allocator already exists
        torch.cuda.memory.change_current_allocator(allocator)
        held = [torch.empty(1000 * (i + 1), dtype=torch.uint8, device="cuda") for i in range(20)]
        del held[::2]
        print(mine.held_bytes(), mine.calls(), flush=True)
        del held
    else:
        outside = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        pool = torch.cuda.MemPool(allocator.allocator())
        with torch.cuda.use_mem_pool(pool):
            inside = [
                torch.empty(size, dtype=torch.uint8, device="cuda") for size in (5, 700_000, 30_000_000)
            ]
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
        from checkpoints import checkpoint

        checkpoint("in a MemPool with an allocator of its own")
        print(mine.held_bytes(), mine.calls(), flush=True)
        inside.pop()
        checkpoint("one freed")
        del inside, pool
        torch.cuda.empty_cache()
        checkpoint("pool gone")
