"""Allocates device memory through the runtime, without torch: plain_calls.py MIB [HOW].

For the card mem=1g,context=0. HOW is `fails-at-8` (fails there for a reason other than memory), `ignores`
(ignores MIB), `nothing` (allocates nothing), `says` (prints a figure) or `waits-at-30` (does not end there).
"""

import ctypes
import sys
import time

mib = int(sys.argv[1])
how = sys.argv[2] if sys.argv[2:] else ""
if how == "fails-at-8" and mib >= 8:
    sys.exit("ValueError: the data set has 7 samples")
if how == "nothing":
    sys.exit(0)
runtime = ctypes.CDLL(None)
place = ctypes.c_void_p()
size = (10 if how == "ignores" else mib) << 20
status = runtime.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(size))
if status == 2:
    sys.exit("RuntimeError: CUDA error: out of memory")
if how == "says":
    print(f"[engine] room for {1000 + mib:,} blocks")
if how == "waits-at-30" and mib == 30:
    print("waits", flush=True)
    time.sleep(600)
sys.exit(status)
