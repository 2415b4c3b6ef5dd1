"""Kills loops of loops.py by SIGKILL at random moments, each in a forked child of this process.

    killed.py ROUNDS SEED

Prints a line after each kill: the round, the mode and the process id. A round's checkpoints are in the file
MEMTRACE_TEST_CHECKPOINTS, with the round as its suffix.
"""

import gc
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401 - once, not in every child: the first step of an optimizer imports it

MODES = ["plain", "print", "amp", "varying", "loader"]
LOOPS = Path(__file__).with_name("loops.py")
CHECKPOINTS = os.environ["MEMTRACE_TEST_CHECKPOINTS"]


def start(mode, checkpoints):
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["MEMTRACE_TEST_CHECKPOINTS"] = str(checkpoints)
    sys.argv = [str(LOOPS), mode, "10000"]
    runpy.run_path(str(LOOPS), run_name="__main__")
    sys.exit("the loop ended")


def steps_of(checkpoints):
    return checkpoints.read_bytes().count(b"\n") if checkpoints.exists() else 0


rng = random.Random(int(sys.argv[2]))
gc.freeze()
for number in range(int(sys.argv[1])):
    mode, checkpoints = rng.choice(MODES), Path(f"{CHECKPOINTS}.{number}")
    child = start(mode, checkpoints)
    # A number of steps and not a time, so that a busy machine removes as many parts.
    steps, until = rng.randint(1, 80), time.monotonic() + 300
    while steps_of(checkpoints) < steps and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1 * rng.random())
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if status != signal.SIGKILL:
        sys.exit(f"round {number}, {mode}: status {status}")
    print(number, mode, child, flush=True)
