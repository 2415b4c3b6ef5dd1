"""Holds pinned memory that is in use, cached, and in use again for a larger request."""

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))
import memtrace  # noqa: E402

MIB = 1 << 20
torch.zeros(1, device="cuda")
held = [torch.empty(33 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
for tensor in held:
    # With a real driver, all pages of a block are resident.
    ctypes.memset(tensor.data_ptr(), 1, 64 * MIB)
del held[:4], tensor
again = torch.empty(40 * MIB, dtype=torch.uint8, pin_memory=True)
ctypes.CDLL(None).memtrace_flush()
memtrace.mark("flushed")
