#!/usr/bin/env python3
"""Measures the processor time that samples of the host add to memtrace's writer thread.

    benches/host_samples.py PYTHON [--seconds 140] [CASE...]   PYTHON has torch; needs cargo build --release

Each case runs two programs at once: one with MEMTRACE_SAMPLE_MS=1000 (the default) and one with 0. The
kernel's count of the writer thread's processor time is read after START seconds and at the end. The table
shows the difference of the two programs, as a share of one core: over all seconds, and without the first
START seconds. The last column is the load of the machine.
"""

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from parts.built import BUILT

MEMTRACE = BUILT / "memtrace"
START = 40
# For each case: resident memory in GiB in addition to torch's, child processes, and steps a second.
CASES = {
    "small": (0, 0, 2),
    "small-busy": (0, 0, 20),
    "large": (5, 0, 2),
    "large-busy": (5, 0, 20),
    "children": (0, 4, 2),
    "many-children": (0, 60, 2),
}


def writer():
    """Returns the processor time of the writer thread, in seconds."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "memtrace":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    sys.exit("memtrace has no writer thread here")


def resident(pid="self"):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def program(gib, children, rate, seconds):
    import torch

    kept = bytearray(gib << 30)
    kept[:: mmap.PAGESIZE] = b"x" * len(kept[:: mmap.PAGESIZE])
    net = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(net.parameters())
    forked = []
    for _ in range(children):
        forked.append(os.fork())
        if forked[-1] == 0:
            time.sleep(seconds + 30)
            os._exit(0)
    # The thread had no processor time before the trace began, which was a moment ago.
    beginning, read = time.monotonic(), [(0.0, 0.0)]
    while True:
        passed = time.monotonic() - beginning
        if len(read) == 1 and passed >= START or passed >= seconds:
            read.append((passed, writer()))
        if passed >= seconds:
            break
        net(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(1 / rate)
    print(json.dumps({"resident": resident(), "read": read}), flush=True)
    for pid in forked:
        os.kill(pid, signal.SIGKILL)


def measure(python, case, seconds):
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for every in ("1000", "0"):
            command = [
                MEMTRACE,
                "run",
                "-q",
                "--phantom",
                "h100-80g",
                "-o",
                f"{folder}/{every}",
                "--",
                python,
            ]
            command += [__file__, "--program", *map(str, CASES[case]), str(seconds)]
            env = {**os.environ, "MEMTRACE_SAMPLE_MS": every}
            running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        answers = [json.loads(process.communicate()[0]) for process in running]

    def share(first):
        (seconds, sampled), (_, unsampled) = [
            (now - then, after - before)
            for (then, before), (now, after) in ((one["read"][first], one["read"][2]) for one in answers)
        ]
        return (sampled - unsampled) / seconds

    return answers[0]["resident"] / 2**30, share(0), share(1)


def main():
    if sys.argv[1:2] == ["--program"]:
        return program(*map(int, sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--seconds", type=int, default=140)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    if args.seconds <= START:
        parser.error(f"--seconds must be more than {START}")
    print("| program | resident memory | child processes | steps a second | added | after 40 s | load |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in args.cases:
        rounds = [measure(args.python, case, args.seconds) for _ in range(args.rounds)]
        _, children, rate = CASES[case]
        shares = [" ".join(f"{100 * one[at]:.2f}%" for one in rounds) for at in (1, 2)]
        figures = f"{rounds[0][0]:.1f} GiB | {children} | {rate} | {' | '.join(shares)}"
        print(f"| {case} | {figures} | {os.getloadavg()[1]:.1f} |", flush=True)
    return None


main()
