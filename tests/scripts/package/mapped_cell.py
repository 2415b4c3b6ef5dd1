"""Checks what a notebook prints about the memory of a cell: one that only maps a tensor of another process
(CUDA IPC), and one that uses two GPUs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from memtrace import _blocks, _magics

HEADER = "device,alloc_id,a,b,c,d,event,source,delta_bytes,module,op,phase,category"


def added(rows: list[str]) -> str:
    """Returns what the magic prints for a cell with these rows."""
    text = "\n".join([HEADER, *rows]) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        path.write_text(text)
        start = _blocks.Position(path, 0)
        end = _blocks.Position(path, len(text))
        return _magics.added(_blocks.use_between(start, end, []))


def row(device: int, block: int, event: str, size: int) -> str:
    return f"{device},{block},0,0,0,0,{event},libtorch_cuda.so,{size},(none),(none),(none),(none)"


MAPPED = row(0, 1, "ext_alloc", 0)
ONLY_MAPPED = added([MAPPED])
assert ONLY_MAPPED == "The cell added 0 B that is still in use; at its peak it held 0 B.", ONLY_MAPPED
BOTH = added([MAPPED, row(0, 2, "alloc", 4096)])
assert "100.0 %" in BOTH and len(BOTH.splitlines()) == 4, BOTH
# On each GPU, no more memory is left than there was at the peak.
USES = [row(0, 1, "alloc", 3072), row(1, 2, "alloc", 5120), row(0, 3, "alloc", 1024)]
USES.append(row(0, 3, "free", -1024))
TWO = added(USES)
assert TWO.splitlines()[:2] == [
    "The cell added 3.00 KiB that is still in use on GPU 0; at its peak it held 4.00 KiB there.",
    "The cell added 5.00 KiB that is still in use on GPU 1; at its peak it held 5.00 KiB there.",
], TWO
NOTHING_LEFT = added([*USES, row(0, 1, "free", -3072), row(1, 2, "free", -5120)])
assert NOTHING_LEFT.splitlines()[:3] == [
    "The cell added 0 B that is still in use on GPU 0; at its peak it held 4.00 KiB there.",
    "The cell added 0 B that is still in use on GPU 1; at its peak it held 5.00 KiB there.",
    "At the peak on GPU 1:",
], NOTHING_LEFT
sys.stdout.write("checked\n")
