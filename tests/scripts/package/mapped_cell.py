"""Checks the memory of a notebook's cell that only maps a tensor of another process (CUDA IPC)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from memtrace import _blocks, _magics

HEADER = "device,alloc_id,a,b,c,d,event,source,delta_bytes,module,op,phase,category"
ROWS = [
    "0,1,0,0,0,0,ext_alloc,libtorch_cuda.so,{mapped},(none),(none),(none),(none)",
    "0,2,0,0,0,0,alloc,memtrace,{own},(none),(none),(none),(none)",
]


def added(mapped: int, own: int | None) -> str:
    """Returns what the magic prints for a cell that maps memory and may allocate some."""
    rows = ROWS if own is not None else ROWS[:1]
    text = "\n".join([HEADER, *rows]).format(mapped=mapped, own=own) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        path.write_text(text)
        start = _blocks.Position(path, 0)
        end = _blocks.Position(path, len(text))
        return _magics.added(_blocks.use_between(start, end, []))


ONLY_MAPPED = added(0, None)
assert ONLY_MAPPED == "The cell added 0 B that is still in use; at its peak it held 0 B.", ONLY_MAPPED
BOTH = added(0, 4096)
assert "100.0 %" in BOTH and len(BOTH.splitlines()) == 4, BOTH
sys.stdout.write("checked\n")
