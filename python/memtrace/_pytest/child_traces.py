"""Measures the GPU memory of the processes that a test started, from the traces that they left."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import time
import zlib
from collections import defaultdict
from pathlib import Path

from .. import _blocks, _command
from .._blocks import NotMeasured, Position

# The time in seconds within which a process writes the first row of its trace.
BEGINNING_S = 2


def names() -> frozenset[str]:
    """Returns the names of the traces in the folder of this process."""
    try:
        return frozenset(name for name in os.listdir(_blocks.FOLDER) if _command.is_trace(name))
    except OSError:
        return frozenset()


def add_children(
    use: _blocks.Use, before: frozenset[str], end: Position, others: list[tuple[Position, Position]]
) -> None:
    """Adds to `use` the memory of the descendants whose traces are not in `before`. On each device, the
    memory that is added is the largest sum of the peaks of processes that ran at the same time. Processes
    that began between the positions of `others` do not count.

    Raises NotMeasured if a process has not ended or its trace cannot be read, because its memory is
    unknown."""
    children = []
    for name in sorted(names() - before):
        path = Path(_blocks.FOLDER, name)
        if path == end.path:
            continue
        is_plain = path.suffix == ".csv"
        meta = meta_of(path) or (meta_of_repaired(path) if is_plain else {})
        start = meta.get("start_unix_ns", 0)
        is_other = any(low.time_ns <= start <= high.time_ns for low, high in others)
        # The first row of a .zst file cannot be read here, so its process may be one of the test's.
        if meta and (is_other or not is_of_test(meta)):
            continue
        if not is_plain:
            raise NotMeasured(
                f"a process has a compressed trace ({name}); run the tests without MEMTRACE_COMPRESS"
            )
        children.append((start, *peaks_of(path)))
    if not children:
        return
    use.is_traced = True
    sums: dict[int, int] = defaultdict(int)
    for now, _, _ in children:
        together = [peaks for start, length, peaks in children if start <= now <= start + length]
        for device in {device for peaks in together for device in peaks}:
            sums[device] = max(sums[device], sum(peaks.get(device, 0) for peaks in together))
    for device, size in sums.items():
        use.peaks[device] = use.peaks.get(device, 0) + size
    own = use.device, use.peak
    use.device = max(use.peaks, key=lambda device: use.peaks[device], default=0)
    use.peak = use.peaks.get(use.device, 0)
    if use.device != own[0]:
        use.at_peak, use.moment = [], _blocks.Use().moment
    if sums[use.device] == 0:
        return
    name = "(1 child process)" if len(children) == 1 else f"({len(children)} child processes)"
    owner = _blocks.Owner(name, "(none)", "(none)", "(none)")
    use.at_peak.append((sums[use.device], owner))


def is_of_test(meta: dict) -> bool:
    """Returns True if a process that began during a test belongs to this test.

    Descendants of this process do. So does a daemon, which has lost its ancestors, except with xdist: then a
    test of another worker may have started it."""
    ancestors = meta.get("ancestors", [])
    is_of_run = meta.get("run_id", "") == os.environ.get("MEMTRACE_RUN_ID", "")
    is_daemon = is_of_run and os.getppid() not in ancestors and "PYTEST_XDIST_WORKER" not in os.environ
    return os.getpid() in ancestors or is_daemon


def meta_of_repaired(path: Path) -> dict:
    """Returns the JSON of the first row of a trace, and waits for it if the process has just begun.

    If the process was killed before it wrote the row, the trace is repaired first. Raises NotMeasured if
    there is no such row, because the owner of the memory is then unknown."""
    meta, late = {}, time.monotonic() + BEGINNING_S
    while not meta and time.monotonic() < late:
        time.sleep(0.05)
        meta = meta_of(path)
    if not meta:
        repair(path)
        meta = meta_of(path)
    if not meta:
        raise NotMeasured(
            f"the trace of a process that the test may have started has no first row ({path.name})"
        )
    return meta


def repair(path: Path) -> None:
    """Completes the trace of a killed process."""
    with contextlib.suppress(_command.TraceError):
        _command.run(["check", "--repair", str(path)])


def meta_of(path: Path) -> dict:
    """Returns the JSON of the first row of a trace, or an empty dict if it cannot be read, or not yet."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return json.loads(_blocks.row_of(file.readline(), file.readline())["name"])
    except (OSError, EOFError, KeyError, ValueError, csv.Error, zlib.error):
        return {}


def peaks_of(path: Path) -> tuple[int, dict[int, int]]:
    """Returns the time that a process ran, in ns, and its peak memory on each device, in bytes.

    Repairs the trace of a killed process first. Raises NotMeasured if the process has not ended."""
    length = length_of(path)
    if length is None:
        repair(path)
        length = length_of(path)
    if length is None:
        raise NotMeasured(
            f"a process that the test started has not ended ({path.name}); end it in the test, or start it "
            "in a fixture of a wider scope"
        )
    now: dict[int, int] = defaultdict(int)
    peaks: dict[int, int] = {}
    for _, row in _blocks.rows(path, 0, path.stat().st_size):
        device = int(row["device"])
        # A tag moves bytes between owners in two rows, which must not change the peak.
        if row["event"] != "tag":
            now[device] += int(row["delta_bytes"])
            peaks[device] = max(peaks.get(device, 0), now[device])
    return length, peaks


def length_of(path: Path) -> int | None:
    """Returns the time at the end of a trace in ns, or None if the trace has no end."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 65536, 0))
        lines = file.read().split(b"\n")
    last = lines[-2].split(b",", 7) if len(lines) > 1 and lines[-1] == b"" else []
    return int(last[1]) if last[6:7] == [b"end"] else None
