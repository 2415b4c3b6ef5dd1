"""Measures the memory that this process allocates between two moments (for a test or a cell of a notebook).

The rows of this time in the process's own trace are enough, because the sum of `delta_bytes` over the rows of
a block is its live memory. Blocks that were allocated earlier do not count, so the result does not depend on
the rest of the process.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import _marks, _sizes

_ALLOCATIONS, _FREES = {"alloc", "ext_alloc"}, {"free", "ext_free"}
_EVENTS = _ALLOCATIONS | _FREES | {"tag"}
# CUDA's own libraries allocate memory at their first use and keep it. If it counted, the memory of a test
# would depend on earlier tests.
_KEPT = tuple(
    f"lib{name}"
    for name in (
        *("cublas", "cudart", "cuda.so", "cudnn", "cufft", "cupti", "curand", "cusolver", "cusparse"),
        *("nccl", "nvJitLink", "nvrtc"),
    )
)
# With these settings, the rows of a test may be in two files, or in a compressed file, so they cannot be
# measured.
SPLITTING = ("MEMTRACE_ROTATE", "MEMTRACE_ROTATE_SECS", "MEMTRACE_COMPRESS", "MEMTRACE_KEEP")
# The values that switch such a setting off.
_OFF = ("", "0", "off", "false", "no")
# Read once, as the tracer did when this process began: a test may change the environment or the working
# folder later.
FOLDER = os.path.realpath(os.environ.get("MEMTRACE_OUT") or "memtrace-out")
_SPLIT_BY = [name for name in SPLITTING if os.environ.get(name, "").lower() not in _OFF]


class NotMeasured(Exception):
    """Raised if the memory cannot be measured. The text is the reason."""


@dataclass
class Owner:
    """The owner of a block, as recorded in its rows."""

    module: str
    op: str
    phase: str
    category: str


@dataclass
class Use:
    """The blocks that were allocated between two positions: their memory at its peak, on the device with the
    highest peak, and the blocks left at the end, on all devices. Sizes are in bytes."""

    is_traced: bool = True
    device: int = 0
    peak: int = 0
    moment: Owner = field(default_factory=lambda: Owner("(none)", "(none)", "(none)", "(none)"))
    at_peak: list[tuple[int, Owner]] = field(default_factory=list)
    # The highest memory on each device.
    peaks: dict[int, int] = field(default_factory=dict)
    left: list[tuple[int, Owner]] = field(default_factory=list)
    # The bytes of `left` on each device.
    left_on: dict[int, int] = field(default_factory=dict)

    @property
    def left_bytes(self) -> int:
        """Returns the bytes that are still in use at the end, on all devices."""
        return sum(size for size, _ in self.left)


@dataclass(frozen=True)
class Position:
    """A position in the trace of this process. The rows of all earlier events are before it."""

    path: Path | None
    offset: int
    # A lower and an upper bound of the bytes that PyTorch had allocated at this position. They differ if
    # other threads allocate meanwhile.
    allocated: tuple[int, int] = (0, 0)
    time_ns: int = 0


def here() -> Position:
    """Writes everything recorded so far. Returns the position at the end of this process's trace."""
    least = _ever_allocated()
    if not _marks.flush():
        raise NotMeasured("the trace of this process ended early, or cannot be written fast enough")
    path = _own_trace()
    size = path.stat().st_size if path is not None else 0
    return Position(path, size, (least, _ever_allocated()), time.time_ns())


def _uses_gpu() -> bool:
    """Returns True if PyTorch has initialized CUDA in this process."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _ever_allocated() -> int:
    """Returns the total bytes that PyTorch's caching allocator has handed out, by its own count."""
    if not _uses_gpu():
        return 0
    torch = sys.modules["torch"]
    if torch.cuda.get_allocator_backend() != "native":
        return 0
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0) for device in devices)


def _own_trace() -> Path | None:
    """Returns the trace that this process writes (an open file), or None before its first row."""
    if _SPLIT_BY:
        raise NotMeasured(f"the trace has several files, because {_SPLIT_BY[0]} is set")
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if os.path.dirname(path) == FOLDER and path.endswith(".csv"):
            return Path(path)
    if _ever_allocated():
        raise NotMeasured(f"the trace of this process is not open in {FOLDER}")
    return None


@dataclass
class _Changes:
    """The changes of the memory of the blocks that were allocated between two positions."""

    # Blocks that were allocated between the positions of such a pair do not count.
    others: list[tuple[Position, Position]]
    # The blocks that are live at the end, by device and id, with their sizes in bytes.
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    # The last owner of each block, by its id.
    owners: dict[int, Owner] = field(default_factory=dict)
    # The device, block and bytes of each allocation and free.
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    # The bytes of all allocations of PyTorch, which may include blocks that do not count.
    traced: int = 0

    def add(self, offset: int, row: dict[str, str]) -> None:
        """Adds a row, which begins at this offset of the trace."""
        device, block, delta = int(row["device"]), int(row["alloc_id"]), int(row["delta_bytes"])
        key = (device, block)
        if row["event"] in _ALLOCATIONS:
            self.traced += delta if row["event"] == "alloc" else 0
            # Memory of another process that this one maps (CUDA IPC) counts there, and adds 0 bytes here.
            if delta == 0 or any(low.offset <= offset < high.offset for low, high in self.others):
                return
            self.live[key] = delta
        elif key not in self.live:
            # The block does not count, or was allocated before the first position.
            return
        if delta > 0 or row["event"] in _ALLOCATIONS:
            # A tag moves a block in two rows. The second row has the new owner.
            self.owners[block] = Owner(row["module"], row["op"], row["phase"], row["category"])
        if row["event"] == "tag":
            return
        if row["event"] in _FREES:
            del self.live[key]
        self.changes.append((device, block, delta))

    def peaks(self) -> dict[int, tuple[int, int]]:
        """Returns the highest memory on each device, with the number of changes until then."""
        totals: dict[int, int] = defaultdict(int)
        peaks: dict[int, tuple[int, int]] = {}
        for count, (device, _, delta) in enumerate(self.changes, 1):
            totals[device] += delta
            if totals[device] > peaks.get(device, (0, 0))[0]:
                peaks[device] = (totals[device], count)
        return peaks

    def live_after(self, count: int, device: int) -> list[tuple[int, Owner]]:
        """Returns the blocks that are live on a device after the first `count` changes."""
        live: dict[int, int] = {}
        for changed, block, delta in self.changes[:count]:
            if changed != device:
                continue
            if delta > 0:
                live[block] = delta
            else:
                live.pop(block, None)
        return [(size, self.owners[block]) for block, size in live.items()]


def use_between(start: Position, end: Position, others: list[tuple[Position, Position]]) -> Use:
    """Returns the memory of the blocks that were allocated between two positions, except the blocks that were
    allocated between the positions of a pair in `others`.

    Raises NotMeasured if the trace lacks rows of that time."""
    if end.path is None and start.path is None:
        return Use(is_traced=False)
    if start.path not in (None, end.path) or end.offset < start.offset:
        raise NotMeasured(f"the trace {start.path} was cut, or continued in another file")
    found = _Changes(others)
    for offset, row in rows(end.path, start.offset, end.offset):
        found.add(offset, row)
    allocated = end.allocated[0] - start.allocated[1]
    if found.traced < allocated:
        traced, wanted = _sizes.show(found.traced), _sizes.show(allocated)
        raise NotMeasured(f"the trace has {traced} of the {wanted} that PyTorch allocated")
    # The marks of the plugin are in the trace of a process without a GPU, too.
    use = Use(is_traced=bool(found.changes) or _uses_gpu())
    for (device, block), size in found.live.items():
        use.left.append((size, found.owners[block]))
        use.left_on[device] = use.left_on.get(device, 0) + size
    peaks = found.peaks()
    use.peaks = {device: peak for device, (peak, _) in peaks.items()}
    if peaks:
        use.device, (use.peak, count) = max(peaks.items(), key=lambda item: item[1][0])
        use.at_peak = found.live_after(count, use.device)
        use.moment = found.owners[found.changes[count - 1][1]]
    return use


def rows(path: Path, start: int, end: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of GPU blocks between two offsets of the file. Each is a dict, after its own offset.

    Leaves out the memory of CUDA's own libraries. Raises NotMeasured if rows are missing or damaged."""
    with path.open("rb") as file:
        header = file.readline()
        at = max(start, file.tell())
        file.seek(at)
        while at < end:
            line = file.readline()
            place, at = at, at + len(line)
            # The columns before `event` are numbers.
            fields = line.split(b",", 7)
            if not line:
                raise NotMeasured(f"{path} was cut")
            if fields[6:7] == [b"lost"]:
                raise NotMeasured("the trace lost events: set a larger MEMTRACE_BUFFER")
            if fields[6:7] == [b"brief"]:
                raise NotMeasured("the trace does not have every block: set MEMTRACE_BRIEF=0")
            if len(fields) < 8 or fields[6].decode(errors="replace") not in _EVENTS:
                continue
            try:
                row = row_of(header, line)
                is_gpu = int(row["device"]) >= 0
                is_own = not row["event"].startswith("ext_") or not row["source"].startswith(_KEPT)
            except (csv.Error, KeyError, ValueError) as error:
                raise NotMeasured(f"{path} is damaged") from error
            if is_gpu and is_own:
                yield place, row


def row_of(header: bytes, line: bytes) -> dict[str, str]:
    """Returns a line of a trace as a dict, by the columns of `header`. The last keys are missing if the line
    is too short. Raises csv.Error for invalid CSV."""
    columns, fields = csv.reader(text.decode(errors="replace").rstrip("\n") for text in (header, line))
    return dict(zip(columns, fields))


def by_owner(blocks: list[tuple[int, Owner]], top: int = 8) -> list[tuple[str, str, int, int]]:
    """Returns the owners with the most bytes first: module, category, bytes and number of blocks. If there
    are more than `top` + 1 owners, the last entry sums all but the first `top`."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for size, owner in blocks:
        name = owner.module if owner.module != "(none)" else "(no module)"
        category = owner.category if owner.category != "(none)" else ""
        group = groups[name, category]
        group[0] += size
        group[1] += 1
    ordered = sorted(groups.items(), key=lambda item: -item[1][0])
    lines = [(name, category, size, count) for (name, category), (size, count) in ordered]
    if len(lines) > top + 1:
        rest = lines[top:]
        joined = (f"{len(rest)} more", "", sum(line[2] for line in rest), sum(line[3] for line in rest))
        lines = [*lines[:top], joined]
    return lines


def table(blocks: list[tuple[int, Owner]], total: int) -> list[str]:
    """Returns the owners of blocks as the lines of a table."""
    rows = [("bytes", "share", "blocks", "module", "category")]
    for name, category, size, count in by_owner(blocks):
        rows.append((_sizes.show(size), f"{100 * size / total:.1f} %", str(count), name, category))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        "  ".join(
            text.rjust(width) if column < 3 else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
