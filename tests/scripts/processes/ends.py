"""Allocates on the device and ends in the way that argv[1] names.

ends.py --each FOLDER WAY... ends in each way in a forked child, whose output is in FOLDER/WAY.out and
FOLDER/WAY.err, and prints the ways and their statuses.
"""

import os
import signal
import sys
import threading

import torch


def each(folder, ways):
    """Returns each way in a forked child of its own. The parent ends after the last one."""
    for way in ways:
        child = os.fork()
        if child == 0:
            for number, ending in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{way}.{ending}", os.O_WRONLY | os.O_CREAT), number)
            return way
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{way}={status if status >= 0 else 128 - status}", flush=True)
    os._exit(0)


how = each(sys.argv[2], sys.argv[3:]) if sys.argv[1] == "--each" else sys.argv[1]
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
