"""Allocates what one of several GPUs holds of a model, without torch: shared_calls.py GPUS [MIB] [HOW].

16 GiB are shared among GPUS; MIB (default 100) are not. HOW is `fails-at-N` (fails on N GPUs for a reason
other than memory), `alone` (the second of two runs at once fails, and the first waits for it) or `waits`
(starts two processes, prints their ids, and does not end).
"""

import ctypes
import os
import subprocess
import sys
import time

gpus = int(sys.argv[1])
mib = int(sys.argv[2]) if sys.argv[2:] else 100
how = sys.argv[3] if sys.argv[3:] else ""
if how == f"fails-at-{gpus}":
    sys.exit(f"ValueError: {gpus} ranks cannot share 30 heads")
if how == "alone":
    try:
        os.mkdir("busy")
    except FileExistsError:
        open("collided", "w").close()
        sys.exit("OSError: address already in use")
    while not os.path.exists("collided"):
        time.sleep(0.01)
runtime = ctypes.CDLL(None)
place = ctypes.c_void_p()
status = runtime.cudaMalloc(ctypes.byref(place), ctypes.c_size_t((16384 // gpus + mib) << 20))
if how == "alone":
    os.rmdir("busy")
if status == 2:
    sys.exit("RuntimeError: CUDA error: out of memory")
if how == "waits":
    # The second process has its own session, as torchrun's workers have.
    sleeps = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    print("waits", *(process.pid for process in sleeps), flush=True)
    time.sleep(600)
sys.exit(status)
