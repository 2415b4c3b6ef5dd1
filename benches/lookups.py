#!/usr/bin/env python3
"""Measures the cost of the hooks of dlsym and cuGetProcAddress: for look-ups in a loop, and for `import
torch`.

    benches/lookups.py [PYTHON...]      each PYTHON has torch; needs gcc and cargo build --release

Look-ups: the shortest of several rounds, traced and as a ratio to untraced, in one run.

Imports: each round runs every setting once, in turn, so a slow moment of the machine falls on all of them. A
ratio compares two runs of one round. The table shows the median of the seconds, and the median and the
quartiles of the ratios, for wall time and CPU time. "untraced again" shows the noise, MEMTRACE_ENABLED=0 the
cost of the preload itself.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from parts.built import BUILT, ROOT, clean_environment

LIBRARY = BUILT / "libmemtrace.so"
PHANTOM = BUILT / "libmemtrace_phantom.so"
ROUNDS = 7
IMPORTS = 21
WAYS = {"untraced": None, "MEMTRACE_ENABLED=0": "0", "traced": "1"}


def environment(enabled, folder):
    preload = [str(PHANTOM)] if enabled is None else [str(LIBRARY), str(PHANTOM)]
    return clean_environment() | {
        "LD_PRELOAD": ":".join(preload),
        "MEMTRACE_PHANTOM": "h100-80g",
        "MEMTRACE_ENABLED": enabled or "1",
        "MEMTRACE_OUT": folder,
    }


def lookups(folder):
    programs = ROOT / "tests" / "programs"
    driver, program = f"{folder}/libcuda.so.1", f"{folder}/lookups"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", driver, programs / "fakes" / "libcuda.c"], check=True
    )
    subprocess.run(["gcc", "-O1", "-o", program, programs / "lookups" / "lookups.c", "-ldl"], check=True)
    best = {}
    for _ in range(ROUNDS):
        for way, enabled in WAYS.items():
            env = environment(enabled, folder)
            env["LD_PRELOAD"] = "" if enabled is None else str(LIBRARY)
            done = subprocess.run(
                [program, driver, "200000"], env=env, check=True, capture_output=True, text=True
            )
            for line in done.stdout.splitlines():
                name, ns = line.split()
                best[way, name] = min(best.get((way, name), 1e9), float(ns))
    print(f"{'a look-up of':24}" + "".join(f"{way:>24}" for way in WAYS))
    names = {
        "libc": "libc's qsort, dlsym",
        "driver": "cuMemAlloc_v2, dlsym",
        "driver_other": "cuInit, dlsym",
        "entry_point": "cuGetProcAddress",
    }
    for name, shown in names.items():
        base = best["untraced", name]
        cells = (f"{best[way, name]:7.1f} ns {best[way, name] / base:5.2f} x" for way in WAYS)
        print(f"{shown:24}" + "".join(f"{cell:>24}" for cell in cells))


def imports(python, folder):
    ways = [("untraced", None), ("untraced again", None), *list(WAYS.items())[1:]]
    taken = {way: [] for way, _ in ways}
    for number in range(IMPORTS):
        # The first setting of a round runs on a colder machine, so each round starts with another one.
        for way, enabled in ways[number % len(ways) :] + ways[: number % len(ways)]:
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run([python, "-c", "import torch"], env=environment(enabled, folder), check=True)
            wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            taken[way].append((wall, cpu))
    print(f"import torch, {IMPORTS} rounds, {python}")
    for way, runs in taken.items():
        cells = []
        for kind in range(2):
            ratios = [run[kind] / base[kind] for run, base in zip(runs, taken["untraced"])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            seconds = statistics.median(run[kind] for run in runs)
            cells.append(f"{seconds:8.3f} s {middle:6.3f} x ({low:.3f} to {high:.3f})")
        print(f"{way:24}clock {cells[0]}   CPU {cells[1]}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        lookups(folder)
        for python in sys.argv[1:]:
            imports(python, folder)


if __name__ == "__main__":
    main()
