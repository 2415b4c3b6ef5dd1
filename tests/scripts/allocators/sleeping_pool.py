"""A pool of torch's allocator whose owner unmaps its memory and maps it again, as vLLM does to sleep.

Prints the device's memory in use at each of its marks: `awake`, `asleep` and `awake again`. While the pool
sleeps, the program allocates from torch's usual pool.
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

# Segments by the driver's virtual memory calls. `sleep_all` unmaps their memory, `wake_all` maps new memory.
SOURCE = """
#include <stddef.h>
#include <sys/types.h>
int cuMemAddressReserve(void **, size_t, size_t, void *, unsigned long long);
int cuMemAddressFree(void *, size_t);
int cuMemCreate(unsigned long long *, size_t, const int *, unsigned long long);
int cuMemRelease(unsigned long long);
int cuMemMap(void *, size_t, size_t, unsigned long long, unsigned long long), cuMemUnmap(void *, size_t);
int cuMemSetAccess(void *, size_t, const int *, size_t);
static const int properties[8] = {1, 0, 1, 0}, rights[3] = {1, 0, 3};
static struct { void *at; size_t size; unsigned long long handle; } held[64];
static int count;
static int map(int i) {
    return cuMemCreate(&held[i].handle, held[i].size, properties, 0) ||
           cuMemMap(held[i].at, held[i].size, 0, held[i].handle, 0) ||
           cuMemSetAccess(held[i].at, held[i].size, rights, 1);
}
static int unmap(int i) { return cuMemUnmap(held[i].at, held[i].size) || cuMemRelease(held[i].handle); }
void *allocate(ssize_t size, int device, void *stream) {
    held[count].size = (size + 0x1fffff) & ~0x1fffff;
    if (cuMemAddressReserve(&held[count].at, held[count].size, 0, NULL, 0) || map(count)) return NULL;
    return held[count++].at;
}
void give_back(void *address, ssize_t size, int device, void *stream) {
    for (int i = 0; i < count; i++)
        if (held[i].at == address) unmap(i), cuMemAddressFree(address, held[i].size);
}
int sleep_all(void) { int bad = 0; for (int i = 0; i < count; i++) bad |= unmap(i); return bad; }
int wake_all(void) { int bad = 0; for (int i = 0; i < count; i++) bad |= map(i); return bad; }
"""


class Server(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2048, 2048, device="cuda")
        self.kv_cache = torch.zeros(30, 1 << 20, device="cuda")

    def forward(self, x):
        return self.linear(x)


def tell(mark):
    free, total = torch.cuda.mem_get_info()
    torch.cuda.nvtx.mark(mark)
    print(total - free, flush=True)


if not hasattr(torch.cuda, "MemPool"):
    sys.exit("no MemPool")
folder = tempfile.mkdtemp()
source, library = Path(folder) / "mine.c", Path(folder) / "libmine.so"
source.write_text(SOURCE)
subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "allocate", "give_back")
mine = ctypes.CDLL(str(library))
pool = torch.cuda.MemPool(getattr(allocator, "_allocator", None) or allocator.allocator())
with torch.no_grad():
    with torch.cuda.use_mem_pool(pool):
        server = Server()
    server(torch.ones(4, 2048, device="cuda"))
    server(torch.ones(4, 2048, device="cuda"))
    tell("awake")
    assert mine.sleep_all() == 0
    others = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    tell("asleep")
    assert mine.wake_all() == 0
    del others
    torch.cuda.empty_cache()
    server(torch.ones(4, 2048, device="cuda"))
    tell("awake again")
sys.stdout.flush()
