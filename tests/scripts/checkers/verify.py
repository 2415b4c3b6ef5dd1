"""Compares a trace with torch's own statistics of its memory.

    python3 verify.py TRACE.csv CHECKPOINTS

Needs only the standard library, so that scripts/gpu-check can run it anywhere. Prints the number of
comparisons and each difference, and exits 1 if there is one.

The replay here follows the documentation of the schema alone and shares no code with memtrace, so agreement
is evidence for both.
"""

import collections
import csv
import json
import re
import sys

MOST_SHOWN = 20
TEXT = {"event", "api", "source", "op", "module", "phase", "category", "name", "dtype", "shape"}


class Device:
    """The running totals of one device."""

    def __init__(self):
        self.live = {}  # addr -> the alloc row
        self.pending = {}  # addr -> the alloc row, freed while a stream still used it
        self.segments = {}  # addr -> bytes
        self.segment_streams = {}  # addr -> the stream of the request
        self.oom_stream = None
        self.mapped = set()  # addresses of pieces of expandable segments
        self.totals = collections.Counter()  # allocated, active, reserved, requested
        self.peaks = collections.Counter()
        self.counts = collections.Counter()

    def move(self, total, delta):
        self.totals[total] += delta
        self.peaks[total] = max(self.peaks[total], self.totals[total])


class Verifier:
    def __init__(self, conf=""):
        """`conf` is the text of PYTORCH_CUDA_ALLOC_CONF."""
        divisions = re.search(r"roundup_power2_divisions:(\d+)", conf)
        self.divisions = int(divisions[1]) if divisions else 0
        # With expandable segments torch counts no segments.
        self.expandable = "expandable_segments:True" in conf
        self.devices = collections.defaultdict(Device)
        self.differences = []
        self.compared = collections.Counter()
        self.skipped = collections.Counter()
        self.tags = collections.Counter()
        self.unknown_requests = False
        self.unknown_pools = False
        self.brief = set()  # the devices with blocks that have no rows of their own
        self.streams = {}  # (device, the trace's stream) -> torch's, and the other way round

    def same(self, what, found, expected, where):
        self.compared[what] += 1
        if found != expected:
            self.differences.append(f"{where}: {what}: the trace has {found}, expected {expected}")

    # ---- the trace against itself

    def row(self, row):
        event, device, addr, delta = row["event"], row["device"], row["addr"], row["delta_bytes"]
        where = f"seq {row['seq']} {event}"
        if device < 0:
            return
        state = self.devices[device]
        if event in ("alloc", "live"):
            self.same("an allocated address is not live already", addr in state.live, False, where)
            self.same("alloc_id of an allocation is its seq", row["alloc_id"], row["seq"], where)
            self.same("a block is a multiple of 512 bytes", delta % 512, 0, where)
            self.same("a block holds its rounded request", delta >= row["rounded_bytes"] > 0, True, where)
            if row["requested_bytes"] < 0:
                self.unknown_requests = True
            else:
                self.same("rounded_bytes", row["rounded_bytes"], self.rounded(row["requested_bytes"]), where)
            state.live[addr] = row
            state.move("allocated", delta)
            state.move("active", delta)
            state.move("requested", row["requested_bytes"])
            state.counts["alloc"] += 1
        elif event == "free":
            block = state.live.pop(addr, None)
            self.same("a freed address was live", block is not None, True, where)
            if block is None:
                return
            self.same("delta_bytes of a free", delta, -block["delta_bytes"], where)
            for column in ("alloc_id", "requested_bytes", "rounded_bytes"):
                self.same(f"{column} is repeated on the free", row[column], block[column], where)
            state.move("allocated", delta)
            state.counts["free"] += 1
            # If the active total of the row has not changed, a stream still uses the block.
            if row["active_bytes"] == state.totals["active"]:
                state.pending[addr] = block
            else:
                state.move("active", delta)
                state.move("requested", -block["requested_bytes"])
        elif event == "free_completed":
            block = state.pending.pop(addr, None)
            self.same("a completed free was pending", block is not None, True, where)
            if block is not None:
                state.move("active", -block["delta_bytes"])
                state.move("requested", -block["requested_bytes"])
        elif event in ("segment_alloc", "segment_map"):
            self.same("a segment is seen, not inferred", row["api"] == "reconciled", False, where)
            if row["status"] == 0:
                state.segments[addr] = delta
                state.segment_streams[addr] = row["stream"]
                if event == "segment_map":
                    state.mapped.add(addr)
                state.counts["segment_alloc"] += 1
            else:
                self.same("delta_bytes of a failed call", delta, 0, where)
                state.counts["failed"] += 1
            state.move("reserved", delta)
        elif event in ("segment_free", "segment_unmap"):
            held = state.segments.pop(addr, None)
            self.same(
                "a freed segment was its stream's",
                row["stream"],
                state.segment_streams.pop(addr, None),
                where,
            )
            state.mapped.discard(addr)
            self.same("a freed segment was held", -delta, held, where)
            state.move("reserved", delta)
            state.counts["segment_free"] += 1
        elif event == "brief":
            self.brief.add(device)
            state.move("allocated", delta)
            state.move("active", delta)
        elif event == "oom":
            state.counts["oom"] += 1
            state.oom_stream = row["stream"]
        elif event == "tag":
            self.tags[row["alloc_id"]] += delta
        for total in ("allocated", "active", "reserved"):
            self.same(
                f"{total}_bytes is the sum of the deltas", row[f"{total}_bytes"], state.totals[total], where
            )

    def rounded(self, size):
        """Rounds like the allocator: to a multiple of 512, or of a fraction of the power of two below."""
        step = 512
        if self.divisions > 1 and size > 512 * self.divisions:
            floor = 1 << (size.bit_length() - 1)
            step = floor if size == floor else floor // self.divisions
        return max(512, -(-size // step) * step)

    # ---- the trace against torch

    def streams_agree(self, index, ours, theirs, where):
        """Checks that each stream of torch maps to one stream of the trace."""
        known = self.streams.setdefault((index, "ours", ours), theirs)
        self.same("a stream of the trace is one stream of torch", known, theirs, where)
        known = self.streams.setdefault((index, "torch's", theirs), ours)
        self.same("a stream of torch is one stream of the trace", known, ours, where)

    def pools_agree(self, index, state, truth, where):
        """Checks that each pool of torch maps to one pool of the trace with the same blocks."""
        theirs = {addr: tuple(pool) for device, addr, pool in truth.get("pools", []) if device == index}
        ours = {addr: block["pool"] for addr, block in state.live.items() if block["pool"]}
        if self.unknown_pools or index in self.brief:
            return
        self.same("blocks of private pools", sorted(ours), sorted(theirs), where)
        for addr in ours.keys() & theirs.keys():
            known = self.streams.setdefault((index, "our pool", ours[addr]), theirs[addr])
            self.same("a pool of the trace is one pool of torch", known, theirs[addr], where)
            known = self.streams.setdefault((index, "torch's pool", theirs[addr]), ours[addr])
            self.same("a pool of torch is one pool of the trace", known, ours[addr], where)

    def checkpoint(self, truth):
        label = truth["label"]
        for index, stats in enumerate(truth["devices"]):
            state = self.devices[index]
            where = f"checkpoint {truth['checkpoint']} ({label}), device {index}"
            pairs = [
                ("allocated_bytes.all.current", state.totals["allocated"]),
                ("allocated_bytes.all.peak", state.peaks["allocated"]),
                ("active_bytes.all.current", state.totals["active"]),
                ("active_bytes.all.peak", state.peaks["active"]),
                ("reserved_bytes.all.current", state.totals["reserved"]),
                ("reserved_bytes.all.peak", state.peaks["reserved"]),
            ]
            # torch counts an allocation that it refuses before it asks the driver apart (2.15).
            ooms = stats.get("num_ooms", 0) + stats.get("num_oom_rejections", 0)
            self.same("OOMs", state.counts["oom"], ooms, where)
            if index not in self.brief:
                pairs.append(("allocation.all.allocated", state.counts["alloc"]))
                pairs.append(("allocation.all.freed", state.counts["free"]))
            if not self.expandable:
                pairs.append(("segment.all.allocated", state.counts["segment_alloc"]))
                pairs.append(("segment.all.freed", state.counts["segment_free"]))
            if not self.unknown_requests and index not in self.brief:
                pairs.append(("requested_bytes.all.current", state.totals["requested"]))
                pairs.append(("requested_bytes.all.peak", state.peaks["requested"]))
            for name, found in pairs:
                self.same(name, found, stats.get(name, 0), where)
            live = {addr: block["delta_bytes"] for addr, block in state.live.items()}
            true_live = {b[1]: b[2] for b in truth["blocks"] if b[0] == index and b[4] == "active_allocated"}
            if index in self.brief:
                # Blocks without rows may be live.
                true_live = {addr: true_live[addr] for addr in live.keys() & true_live.keys()}
            self.same("live blocks by address", Big(live), Big(true_live), where)
            true_segments = {s[1]: s[2] for s in truth["segments"] if s[0] == index}
            self.same("segments by address", Big(joined(state)), Big(true_segments), where)
            if not self.unknown_requests and index not in self.brief:
                requested = {addr: block["requested_bytes"] for addr, block in state.live.items()}
                true_requested = {
                    b[1]: b[3] for b in truth["blocks"] if b[0] == index and b[4] == "active_allocated"
                }
                self.same("requested bytes by address", Big(requested), Big(true_requested), where)
            for device, addr, _, _, true_state, stream in truth["blocks"]:
                if device == index and true_state == "active_allocated" and addr in state.live:
                    self.streams_agree(index, state.live[addr]["stream"], stream, where)
            for device, addr, _, stream, _ in truth["segments"]:
                if device == index and addr in state.segment_streams:
                    self.streams_agree(index, state.segment_streams[addr], stream, where)
            if "oom_stream" in truth:
                self.streams_agree(index, state.oom_stream, truth["oom_stream"], where)
            self.pools_agree(index, state, truth, where)
            for addr, size in truth.get("requested", {}).items():
                block = state.live.get(int(addr))
                self.same("a known request is live", block is not None, True, where)
                if block is None:
                    continue
                expected = (
                    (size, self.rounded(size))
                    if block["requested_bytes"] >= 0
                    else (-1, block["delta_bytes"])
                )
                self.same(
                    "requested and rounded bytes of a known request",
                    (block["requested_bytes"], block["rounded_bytes"]),
                    expected,
                    where,
                )


def joined(state):
    """Returns the segments by address, with adjacent pieces of an expandable segment joined."""
    whole = {}
    last = start = last_end = None
    for addr, size in sorted(state.segments.items()):
        if last is not None and addr in state.mapped and last in state.mapped and last_end == addr:
            whole[start] += size
        else:
            start = addr
            whole[start] = size
        last, last_end = addr, addr + size
    return whole


class Big(dict):
    """A dict that is compared as a whole; its repr has its size and its first items."""

    def __repr__(self):
        head = ", ".join(f"{k:#x}: {v}" for k, v in sorted(self.items())[:3])
        return f"{len(self)} {{{head}, ...}}"


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for column, value in row.items():
                if column not in TEXT:
                    row[column] = int(value)
            yield row


def main():
    trace, checkpoints = sys.argv[1:]
    with open(checkpoints, encoding="utf-8") as file:
        checkpoints = {line["checkpoint"]: line for line in map(json.loads, file)}
    meta = json.loads(next(rows(trace))["name"])
    verifier = Verifier(meta["allocator"]["conf"])
    # A note in the meta row says if memtrace cannot tell the pools of this torch apart; then they are not
    # compared.
    verifier.unknown_pools = any("pools" in what for what in meta["degraded"])
    seq, clock, met = 0, 0, set()
    for row in rows(trace):
        seq += 1
        where = f"seq {row['seq']} {row['event']}"
        verifier.same("seq is gapless", row["seq"], seq, where)
        verifier.same("ts_ns never falls", row["ts_ns"] >= clock, True, where)
        clock = row["ts_ns"]
        verifier.same("nothing was lost", row["event"] == "lost", False, where)
        verifier.row(row)
        mark = re.fullmatch(r"checkpoint:(\d+)", row["name"]) if row["event"] == "mark" else None
        if mark and int(mark[1]) in checkpoints:
            met.add(int(mark[1]))
            verifier.checkpoint(checkpoints[int(mark[1])])
    verifier.same("every checkpoint has its mark", sorted(met), sorted(checkpoints), "end")
    verifier.same(
        "tags move bytes and make none", [i for i, sum_ in verifier.tags.items() if sum_], [], "end"
    )
    verifier.same("the last row is end", row["event"], "end", f"seq {seq}")
    for difference in verifier.differences[:MOST_SHOWN]:
        print(difference)
    if len(verifier.differences) > MOST_SHOWN:
        print(f"... and {len(verifier.differences) - MOST_SHOWN} more")
    print(
        f"{seq} rows, {len(met)} checkpoints, {sum(verifier.compared.values())} comparisons, "
        f"{len(verifier.differences)} differences"
    )
    sys.exit(1 if verifier.differences or not met else 0)


if __name__ == "__main__":
    main()
