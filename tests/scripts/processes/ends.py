"""Allocates on the device and ends in the way that argv[1] names."""

import os
import signal
import sys
import threading

import torch

how = sys.argv[1]
kept = [torch.empty(1000 * (i + 1), dtype=torch.uint8, device="cuda") for i in range(50)]
print("allocated", torch.cuda.memory_allocated())
print("to stderr", file=sys.stderr)

if how == "normal":
    pass
elif how == "exit 3":
    sys.exit(3)
elif how == "exception":
    raise ValueError("a program's own error")
elif how == "caught oom":
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        print("caught", type(error).__name__, error)
    print("allocated", torch.cuda.memory_allocated())
elif how == "killing oom":
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
elif how == "_exit":
    sys.stdout.flush()
    os._exit(5)
elif how == "abort":
    sys.stdout.flush()
    os.abort()
elif how == "segfault":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "terminated":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
elif how == "thread":
    thread = threading.Thread(target=lambda: kept.append(torch.ones(7000, device="cuda")))
    thread.start()
    thread.join()
    print("allocated", torch.cuda.memory_allocated())
elif how == "exec":
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])
else:
    sys.exit(f"unknown: {how}")
