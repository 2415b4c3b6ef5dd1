"""Compares `memtrace.read` and `polars.read_csv`: read.py TRACE ROUNDS. For scripts/reading-bench.

Each read runs in its own process, because a second read in the same process would find warm memory. The two
readers alternate, so both see the same machine."""

import statistics
import subprocess
import sys

READERS = {
    "polars.read_csv": "polars.read_csv(path)",
    "memtrace.read": "memtrace.read(path)",
}
PROGRAM = """
import sys, time, polars, memtrace
from memtrace import _read_polars
path = sys.argv[1]
start = time.perf_counter()
frame = {read}
seconds = time.perf_counter() - start
print(seconds, frame.height, frame.width)
"""


def measure(read, path):
    """Returns the seconds of one read in a fresh process, and the shape of the frame."""
    program = [sys.executable, "-c", PROGRAM.format(read=read), path]
    seconds, *shape = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), shape


def main():
    path, rounds = sys.argv[1], int(sys.argv[2])
    times = {name: [] for name in READERS}
    shapes = set()
    for number in range(rounds + 1):
        for name, read in READERS.items():
            seconds, shape = measure(read, path)
            shapes.add(tuple(shape))
            # The first round brings the file into the page cache.
            if number:
                times[name].append(seconds)
    assert len(shapes) == 1, f"the frames differ in shape: {shapes}"
    print(f"{' x '.join(*shapes)}, {rounds} rounds in turns, seconds")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:16} median {middle:6.2f}  from {min(values):6.2f} to {max(values):6.2f}")
    ratios = [own / alone for own, alone in zip(times["memtrace.read"], times["polars.read_csv"])]
    print(
        f"memtrace.read / polars.read_csv of each round: median {statistics.median(ratios):.2f}, "
        f"from {min(ratios):.2f} to {max(ratios):.2f}"
    )


main()
