"""Compares what memtrace answers about memory snapshots of PyTorch with a computation of its own.

    snapshots.py MEMTRACE FILE...

For each file, `summary`, `peak` and `frag` must give the same bytes. Prints one line of figures for each file
and device. A failure is an exception. The pickles may come from strangers: a class in one is an error.
"""

import bisect
import collections
import json
import pickle
import subprocess
import sys

MIB = 1 << 20
HOLDING = ("active_allocated", "active_pending_free", "active_awaiting_free")


class Unpickler(pickle.Unpickler):
    """Loads a pickle of plain values."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"the pickle wants {module}.{name}")


class Memory:
    """The blocks and the reserved ranges of one device at one time, by address."""

    def __init__(self, segments):
        self.blocks, self.pending, self.ranges = {}, {}, {}
        for segment in segments:
            at = segment["address"]
            expandable = segment.get("is_expandable", False)
            self.ranges[at] = (at + segment["total_size"], expandable)
            for block in segment["blocks"]:
                if block["state"] == HOLDING[0]:
                    self.blocks[at] = block["size"]
                elif block["state"] in HOLDING:
                    self.pending[at] = block["size"]
                at += block["size"]

    def around(self, address):
        """Returns the end of the reserved range around an address, and whether it is expandable."""
        starts = sorted(self.ranges)
        return self.ranges[starts[bisect.bisect_right(starts, address) - 1]]

    def room(self, address):
        """Returns the bytes from an address to the next block, or to the end of the segment."""
        end = self.around(address)[0]
        for blocks in (self.blocks, self.pending):
            end = min([end, *(other for other in blocks if other > address)])
        return end - address

    def cut(self, start, end):
        """Removes reserved memory, which may be a part of a range."""
        for at, (stop, expandable) in list(self.ranges.items()):
            if at < end and stop > start:
                del self.ranges[at]
                if at < start:
                    self.ranges[at] = (start, expandable)
                if stop > end:
                    self.ranges[end] = (stop, expandable)

    def allocated(self):
        return sum(self.blocks.values())

    def reserved(self):
        return sum(stop - at for at, (stop, _) in self.ranges.items())


def rounded(size):
    """Returns the size of the block for a request: a multiple of 512 bytes."""
    return max(512, -(-size // 512) * 512)


def at_start(memory, events):
    """Undoes the events. Returns the sizes of the blocks that live to the end, by event, and the number of
    blocks of unknown size."""
    known, unknown, last, left = {}, 0, {**memory.blocks, **memory.pending}, set()
    for index in reversed(range(len(events))):
        event = events[index]
        action, at, size = event["action"], event.get("addr"), event.get("size")
        if action == "alloc":
            memory.blocks.pop(at, None)
            memory.pending.pop(at, None)
            left.discard(at)
            if at in last:
                known[index] = last.pop(at)
        elif action == "free_completed":
            memory.pending[at] = rounded(size)
            left.add(at)
        elif action == "free_requested":
            memory.blocks[at] = memory.pending.pop(at, rounded(size))
            if at not in last:
                left.add(at)
        elif action in ("segment_alloc", "segment_map"):
            memory.cut(at, at + size)
        elif action in ("segment_free", "segment_unmap"):
            memory.ranges[at] = (at + size, action == "segment_unmap")
    # A block of the large pool may have kept the rest of the free block that it was cut from.
    for at in left:
        blocks = memory.blocks if at in memory.blocks else memory.pending
        if blocks[at] > MIB and not memory.around(at)[1]:
            rest = memory.room(at) - blocks[at]
            unknown += rest > MIB
            blocks[at] += rest if rest <= MIB else 0
    return known, unknown


def replay(memory, events, known):
    """Makes the events again. Returns the peaks of allocated and reserved memory, and the sizes of the blocks
    at the first."""
    peak, at_peak, most = memory.allocated(), collections.Counter(memory.blocks.values()), memory.reserved()
    allocated, reserved, limit = peak, most, known.pop("limit")
    for index, event in enumerate(events):
        action, at, size = event["action"], event.get("addr"), event.get("size")
        if action == "alloc":
            new = known.get(index)
            if new is None:
                new, room = rounded(size), 0
                if new > MIB and not memory.around(at)[1]:
                    room = memory.room(at)
                if new <= room and (room - new <= MIB or limit and new >= limit):
                    new = room
            memory.blocks[at] = new
            allocated += new
        elif action == "free_requested":
            memory.pending[at] = memory.blocks.pop(at)
            allocated -= memory.pending[at]
        elif action == "free_completed":
            memory.pending.pop(at, None)
        elif action in ("segment_alloc", "segment_map"):
            memory.ranges[at] = (at + size, action == "segment_map")
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            memory.cut(at, at + size)
            reserved -= size
        if allocated > peak:
            peak, at_peak = allocated, collections.Counter(memory.blocks.values())
            at_peak.update(memory.pending.values())
        most = max(most, reserved)
    return peak, most, at_peak


def computed(segments, events, limit):
    """Returns the figures of one device."""
    figures = collections.Counter(
        at_end_allocated_bytes=0,
        at_end_reserved_bytes=0,
        hole_bytes=0,
        empty_segment_bytes=0,
        pending_bytes=0,
    )
    for segment in segments:
        held = sum(block["size"] for block in segment["blocks"] if block["state"] in HOLDING)
        figures["at_end_reserved_bytes"] += segment["total_size"]
        figures["hole_bytes" if held else "empty_segment_bytes"] += segment["total_size"] - held
        for block in segment["blocks"]:
            if block["state"] == HOLDING[0]:
                figures["at_end_allocated_bytes"] += block["size"]
            elif block["state"] in HOLDING:
                figures["pending_bytes"] += block["size"]
    memory = Memory(segments)
    known, unknown = at_start(memory, events)
    peak, most, at_peak = replay(memory, events, {**known, "limit": limit})
    assert memory.allocated() == figures["at_end_allocated_bytes"], "the history and the segments differ"
    figures.update(peak_allocated=peak, peak_reserved=most, allocations=count(events, "alloc"))
    return figures, at_peak, unknown


def count(events, action):
    return sum(event["action"] == action for event in events)


def answer(memtrace, report, *arguments):
    """Returns the JSON of a report."""
    command = [memtrace, report, "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def check(memtrace, path):
    """Compares the answers about one file with the computed figures."""
    with open(path, "rb") as file:
        snapshot = Unpickler(file).load()
    limit = max(0, snapshot.get("allocator_settings", {}).get("max_split_size", 0))
    devices = {segment["device"] for segment in snapshot["segments"]}
    devices |= {device for device, events in enumerate(snapshot["device_traces"]) if events}
    process = answer(memtrace, "summary", path)["processes"][0]
    allocations = 0
    for device in sorted(devices):
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        segments.sort(key=lambda segment: segment["address"])
        events = snapshot["device_traces"][device] if device < len(snapshot["device_traces"]) else []
        figures, at_peak, unknown = computed(segments, events, limit)
        allocations += figures["allocations"]
        summary = next(each for each in process["devices"] if each["device"] == device)
        frag = answer(memtrace, "frag", "--at", "end", "--device", str(device), path)["devices"][0]
        for key in ("hole_bytes", "empty_segment_bytes", "pending_bytes"):
            assert frag[key] == figures[key], (path, device, key, frag[key], figures[key])
        for key in ("at_end_allocated_bytes", "at_end_reserved_bytes"):
            assert summary[key] == figures[key], (path, device, key, summary[key], figures[key])
        for key in ("peak_allocated", "peak_reserved"):
            assert summary[key]["bytes"] == figures[key], (path, device, key, summary[key], figures[key])
        groups = answer(memtrace, "peak", "--by", "size", "--top", "1000000", "--device", str(device), path)
        live = sum(group["blocks"] for group in groups["groups"])
        assert groups["peak"]["bytes"] == figures["peak_allocated"], (path, device, groups["peak"])
        assert live == sum(at_peak.values()), (path, device, live, sum(at_peak.values()))
        print(
            f"{path} device {device}: {len(events)} events, {len(segments)} segments,"
            f" peak {figures['peak_allocated']} in {live} blocks, reserved {figures['peak_reserved']},"
            f" at end {figures['at_end_allocated_bytes']}, holes {figures['hole_bytes']},"
            f" empty {figures['empty_segment_bytes']}, {unknown} of unknown size"
        )
    assert process["events"].get("alloc", 0) == allocations, (path, process["events"])


def main():
    memtrace, *paths = sys.argv[1:]
    for path in paths:
        check(memtrace, path)
    print(f"{len(paths)} snapshots agree")


if __name__ == "__main__":
    main()
