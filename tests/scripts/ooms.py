"""Runs out of memory in one of four ways: big, fragments, outside, limit. Meant for mem=1g,context=0."""

import ctypes
import sys

import torch
from torch.cuda import nvtx

MIB = 1 << 20


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


kind = sys.argv[1]
keep = [block(1)]
if kind == "big":
    keep.append(block(400))
    want = 800
elif kind == "fragments":
    # 50 segments of 20 MiB, each pinned by 2 MiB: 900 MiB are free, in pieces of 18.
    rest = []
    for _ in range(50):
        keep.append(block(2))
        rest += [block(9), block(9)]
    del rest
    want = 300
elif kind == "outside":
    runtime = ctypes.CDLL(None)
    place = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(700 * MIB)) == 0
    want = 500
elif kind == "limit":
    torch.cuda.set_per_process_memory_fraction(0.25)
    want = 400
try:
    with nvtx.range("step:3"), nvtx.range("forward"), nvtx.range("module:Net.wide"):
        block(want)
except torch.OutOfMemoryError:
    print("out of memory")
