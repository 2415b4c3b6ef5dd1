"""Kills argv[1] processes by SIGKILL while they allocate, and prints the number of blocks that each reported.

One line per round: the pid, and the number of blocks in the last report of the process. Block number i has
512 * (i % 1000 + 1) bytes.
"""

import os
import random
import signal
import subprocess
import sys
import time

import torch


def victim(pipe):
    # A write of 8 bytes to a pipe is atomic.
    count = 0
    while True:
        kept = torch.empty(512 * (count % 1000 + 1), dtype=torch.uint8, device="cuda")
        count += 1
        os.write(pipe, count.to_bytes(8, "little"))
        del kept


def start(round, pipe):
    """Starts a process. Most are forked, which is fast; some start a new interpreter."""
    if round % 10 == 0:
        command = [sys.executable, __file__, "victim", str(pipe)]
        return subprocess.Popen(command, pass_fds=[pipe]).pid
    pid = os.fork()
    if pid == 0:
        victim(pipe)
    return pid


def main():
    rng = random.Random(0)
    for round in range(int(sys.argv[1])):
        read, write = os.pipe()
        pid = start(round, write)
        os.close(write)
        word = os.read(read, 1 << 16)[-8:]  # the process has begun
        until = time.monotonic() + rng.random() * 0.3
        while time.monotonic() < until:
            word = os.read(read, 1 << 16)[-8:]
        os.kill(pid, signal.SIGKILL)
        while more := os.read(read, 1 << 16):
            word = more[-8:]
        os.close(read)
        os.waitpid(pid, 0)
        print(pid, int.from_bytes(word, "little"), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "victim":
        victim(int(sys.argv[2]))
    main()
