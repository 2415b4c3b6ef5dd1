"""Reads the files of `memtrace export` with the programs that they are made for.

    exports.py CHECK ARGUMENT...

The checks are the functions below. A failure is an exception; a success prints a line of figures.
"""

import collections
import gzip
import json
import pickle
import pickletools
import sys
from pathlib import Path

# The opcodes that the reader in PyTorch's memory_viz page supports (torch/utils/viz/MemoryViz.js), without
# those that it calls untested, and without BINUNICODE (text of more than 255 bytes), which no name in a trace
# needs here.
OPCODES = {
    "APPEND",
    "APPENDS",
    "BINGET",
    "BININT",
    "BININT1",
    "BININT2",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "FRAME",
    "LONG1",
    "LONG_BINGET",
    "MARK",
    "MEMOIZE",
    "PROTO",
    "SETITEMS",
    "SHORT_BINUNICODE",
    "STOP",
    "TUPLE2",
    "NEWFALSE",
    "NEWTRUE",
    "BINUNICODE",
    "EMPTY_TUPLE",
    "NONE",
    "BINFLOAT",
    "TUPLE",
    "TUPLE1",
    "TUPLE3",
}


def walk(data):
    """Checks that a pickle follows the rules for opcodes, integers, texts and batches."""
    marks, texts, protocol = [], collections.Counter(), None
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        assert name in OPCODES, name
        if name == "PROTO":
            protocol = argument
        elif name == "MARK":
            marks.append(0)
        elif name == "APPENDS":
            assert marks.pop() <= 1000
        elif name == "SETITEMS":
            assert marks.pop() <= 2000
        elif name == "TUPLE2":
            marks[-1] -= 1
        elif name not in ("MEMOIZE", "STOP", "FRAME") and marks:
            marks[-1] += 1
        if isinstance(argument, int):
            assert -(1 << 63) <= argument < 1 << 63
        if name in ("SHORT_BINUNICODE", "BINUNICODE"):
            texts[argument] += 1
    assert 2 <= protocol <= 4, protocol
    repeated = [text for text, times in texts.items() if times > 1]
    assert not repeated, repeated


def viz(*paths):
    import torch
    from torch.cuda import _memory_viz

    def lines(text):
        """Stands in for flamegraph.pl, which the functions would download."""
        for line in text.splitlines():
            stack, size = line.rsplit(" ", 1)
            assert int(size) >= 0 and stack.count(";") >= 1, line
        return text

    for path in paths:
        data = Path(path).read_bytes()
        walk(data)
        snapshot = pickle.loads(data)
        assert set(snapshot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
        _memory_viz.segsum(snapshot)
        _memory_viz.trace(snapshot)
        _memory_viz.memory(snapshot, format_flamegraph=lines)
        _memory_viz.segments(snapshot, format_flamegraph=lines)
        for page in (
            _memory_viz.segment_plot(snapshot),
            _memory_viz.trace_plot(snapshot),
            _memory_viz.trace_plot(snapshot, plot_segments=True),
        ):
            assert "MemoryViz.js" in page
        for segment in snapshot["segments"]:
            assert 0 <= segment["device"] < len(snapshot["device_traces"])
            at = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == at and block["size"] > 0, (segment, block)
                assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
                at += block["size"]
            assert at == segment["address"] + segment["total_size"], segment
        for device, trace in enumerate(snapshot["device_traces"]):
            follow(trace, [segment for segment in snapshot["segments"] if segment["device"] == device])
            categories = {entry["category"] for entry in trace if "category" in entry}
            assert not categories or "unknown" in categories, categories
    print(len(paths), "snapshots accepted by", torch.__version__)


def follow(trace, segments):
    """Replays the events backwards from the final state, as the page does: each event must match the state at
    its time."""
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = {block["address"] for block in blocks if block["state"] != "inactive"}
    for entry in reversed(trace):
        action, address = entry["action"], entry.get("addr")
        if action == "free_completed":
            assert address not in live, entry
            live.add(address)
        elif action == "free_requested":
            assert address in live, entry
        elif action == "alloc":
            assert address in live, entry
            live.remove(address)


def snapshot(ours, theirs):
    ours = pickle.loads(Path(ours).read_bytes())
    truth = pickle.loads(Path(theirs).read_bytes())
    theirs, stats = truth["snapshot"], truth["stats"]
    streams = {}

    def stream(mine, torchs):
        """Checks that each stream number maps to one stream of torch, and the default stream to the default
        stream."""
        assert (mine == 0) == (torchs == 0), (mine, torchs)
        assert streams.setdefault(mine, torchs) == torchs, (mine, torchs, streams)

    mine = {segment["address"]: segment for segment in ours["segments"]}
    torchs = {segment["address"]: segment for segment in theirs["segments"]}
    assert mine.keys() == torchs.keys(), (sorted(mine), sorted(torchs))
    blocks = 0
    for address, segment in torchs.items():
        own = mine[address]
        keys = ["device", "total_size", "allocated_size", "active_size", "requested_size", "is_expandable"]
        for key in keys + ["segment_type"]:
            assert own[key] == segment[key], (key, own, segment)
        stream(own["stream"], segment["stream"])
        private = [tuple(s["segment_pool_id"]) != (0, 0) for s in (own, segment)]
        assert private[0] == private[1], (own, segment)

        def active(segment):
            return [
                (block["address"], block["size"], block["requested_size"], block["state"])
                for block in segment["blocks"]
                if block["state"] != "inactive"
            ]

        assert active(own) == active(segment), (active(own), active(segment))
        blocks += len(active(own))

    def total(key):
        return sum(segment[key] for segment in ours["segments"])

    for key, name in [
        ("allocated_size", "allocated_bytes"),
        ("active_size", "active_bytes"),
        ("total_size", "reserved_bytes"),
        ("requested_size", "requested_bytes"),
    ]:
        assert total(key) == stats[f"{name}.all.current"], (key, total(key), stats[f"{name}.all.current"])

    known = {
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
    }

    def entries(snapshot):
        return [entry for entry in snapshot["device_traces"][0] if entry["action"] in known]

    own, torchs = entries(ours), entries(theirs)
    for at, (mine, other) in enumerate(zip(own, torchs)):
        assert mine["action"] == other["action"], (at, mine, other)
        assert mine["size"] == other["size"], (at, mine, other)
        if mine["action"] != "oom":
            assert mine["addr"] == other["addr"], (at, mine, other)
            stream(mine["stream"], other["stream"])
    assert len(own) == len(torchs), (len(own), len(torchs))
    print(len(torchs), "segments,", blocks, "blocks and", len(own), "entries are torch's own")


def tracker(path, plain, watched):
    from torch.distributed._tools.memory_tracker import MemoryTracker

    loaded = MemoryTracker()
    loaded.load(path)
    loaded.summary(top=5)
    watched = json.loads(Path(watched).read_text())
    allocated = loaded.memories_allocated
    assert list(allocated) == list(range(len(watched["allocated"])))
    for index, (name, size) in watched["allocated"].items():
        mine, own_size = allocated[int(index)]
        assert own_size == size, (index, mine, name)
        # MemoryTracker's name includes the overload, and it numbers each overload separately.
        op = mine.rsplit("_", 1)[0].split(".")[-1].split("::")[-1]
        # An op that Python registered has only the row of the dispatch mode that saw it.
        assert op == "PythonDispatchMode" or f".forward.{op}." in f".{name}", (mine, name)
    assert loaded._markers == watched["markers"], (loaded._markers, watched["markers"])
    # The attribute had another name in older versions.
    retries = "_num_alloc_retries" if hasattr(loaded, "_num_alloc_retries") else "_num_cuda_retries"
    assert getattr(loaded, retries) == watched["retries"]
    assert list(loaded.memories_active) == list(loaded.memories_reserved) == list(allocated)
    plain = json.loads(Path(plain).read_text())
    assert {int(index): tuple(entry) for index, entry in plain["memories_allocated"].items()} == allocated
    assert plain["markers"] == loaded._markers
    print(len(allocated), "op calls loaded")


def timeline(ours, raw, folder):
    """Compares memtrace's timeline of one step with the profiler's. The profiler knows only blocks that an op
    touched, and has its own clock."""
    folder = Path(folder)
    ours, raw = json.loads(Path(ours).read_text()), json.loads(Path(raw).read_text())
    theirs = json.loads((folder / "profiler.json").read_text())
    their_raw = json.loads(gzip.decompress((folder / "profiler.raw.json.gz").read_bytes()))
    for times, rows in (ours, theirs):
        assert len(times) == len(rows)
        assert all(len(row) == 9 and row[0] == 0 for row in rows)
    for event in raw + their_raw:
        assert len(event) == 4 and event[1] in (1, 2, 3, 4) and 0 <= event[3] <= 7, event

    def changes(events):
        return [event[2] for event in events if event[1] in (2, 4)]

    mine, torchs = changes(raw), changes(their_raw)
    # The totals of most events must be the same, in the same order: each side lacks events that only the
    # other recorded.
    import difflib

    matcher = difflib.SequenceMatcher(None, mine, torchs, autojunk=False)
    same = sum(size for _, _, size in matcher.get_matching_blocks())
    only = [(tag, mine[a:b], torchs[c:d]) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]
    print(len(mine), "events here,", len(torchs), "there,", same, "the same; else", only)
    assert same >= 0.97 * max(len(mine), len(torchs)), (same, len(mine), len(torchs))
    before = [sum(event[2] for event in events if event[1] == 1) for events in (raw, their_raw)]
    print("there before:", before)
    # memtrace may have more memory from before the step, because the profiler knows only blocks that the step
    # used.
    assert before[0] >= before[1] > 0, before


def parquet(folder, csvs):
    import duckdb
    import polars

    csvs = sorted(map(str, Path(csvs).glob("*.csv*")))
    frame = polars.concat([polars.read_csv(path) for path in csvs])
    files = f"{folder}/**/*.parquet"
    read = polars.scan_parquet(files, hive_partitioning=True).collect()
    # The fixtures lack the columns that were added later.
    new = set(read.columns) - set(frame.columns)
    assert new == {"dtype", "shape"} and set(frame.columns) < set(read.columns), (read.columns, frame.columns)
    assert all(set(read[column]) == {"?"} for column in new)
    order = ["rank", "seq"]
    read = read.select(frame.columns).with_columns(polars.col("rank").cast(polars.Int64)).sort(order)
    assert read.equals(frame.sort(order)), "polars"
    assert [str(kind) for kind in read.dtypes] == [str(kind) for kind in frame.dtypes]
    sums = (
        "sum(delta_bytes), max(allocated_bytes), max(reserved_bytes), count(*), sum(seq), count(distinct op)"
    )
    query = "select rank, module, {} from {} group by all order by all"
    there = duckdb.sql(query.format(sums, f"read_parquet('{files}', hive_partitioning = true)")).fetchall()
    here = duckdb.sql(query.format(sums, f"read_csv({csvs})")).fetchall()
    assert there == here and len(there) > 0
    meta = duckdb.sql(f"select value from parquet_kv_metadata('{files}') where key = 'memtrace'").fetchall()
    assert all(json.loads(value)["schema"] == "memtrace/1" for (value,) in meta) and len(meta) == len(csvs)
    print(len(read), "rows read alike by polars and duckdb")


def query(folder, sql, frames):
    import os

    import duckdb
    import polars

    os.chdir(folder)
    answers = duckdb.sql(sql).fetchall(), eval(frames, {"polars": polars}).rows()
    assert answers[0] == answers[1], answers
    for row in answers[0] + answers[1]:
        print(*row, sep="\t")


# The events whose rows have no step, or the step in which the block was allocated.
OF_A_BLOCK = {
    "free",
    "free_completed",
    "ext_free",
    "host_free",
    "tag",
    "live",
    "sample",
    "lost",
    "meta",
    "end",
}


def steps_of(path):
    """Returns the highest and last allocated and reserved bytes for each step and device that has rows."""
    import csv

    now, totals, found = -1, {}, {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            if row["event"] not in OF_A_BLOCK:
                now = int(row["step"])
            device = int(row["device"])
            if device < 0 or row["event"] == "end":
                continue
            before = totals.get(device, (0, 0))
            is_of_memory = row["alloc_id"] != "0" or row["event"].startswith("segment_")
            if is_of_memory or row["event"] in OF_A_BLOCK - {"sample", "lost", "meta"}:
                totals[device] = int(row["allocated_bytes"]), int(row["reserved_bytes"])
            elif device not in totals:
                continue
            # Memory that is live when a step begins counts for the step's peak.
            peak = found.get((device, now), (before, None))[0]
            found[device, now] = tuple(map(max, peak, totals[device])), totals[device]
    return {key: [*peak, *end] for key, (peak, end) in found.items()}


def four_parts(process, ask):
    """Compares the parts of the memory in use, after each step and in the growth, with `memtrace leaks`."""
    names = ("kept", "larger_steps", "cached", "outside")
    columns = ", ".join(f"{name}_bytes" for name in names)
    for growth in process["growth"]:
        here = f"and device = {growth['device']} and kept_bytes is not null"
        assert ask(columns, "device", here) == [tuple(growth["growth_parts_bytes"][name] for name in names)]
        # Leaves out the last step if the trace ends inside it: such a step has no row of the four parts.
        levels = growth["levels"][: -1 if growth["to_is_inside_a_step"] else None]
        wanted = [
            (level["step"], *(level["parts_bytes"][name] for name in names))
            for level in levels
            if level["step"] is not None
        ]
        assert ask(f"step, {columns}", "step", here) == wanted


def digest(folder, csvs, *reports):
    """Compares the figures of the digests with the reports on the whole traces, and with the rows."""
    import duckdb

    summary, frag, leaks = (json.loads(Path(path).read_text()) for path in reports)
    table = f"'{folder}/*.digest.parquet'"

    def ask(columns, kind, rank, more=""):
        where = f"where kind = '{kind}' and rank = {rank} {more}"
        return duckdb.sql(
            f"select {columns} from {table} {where} order by device, step, bytes desc"
        ).fetchall()

    traces = {int(path.name.split(".r")[1].split(".")[0]): path for path in Path(csvs).glob("*.csv*")}
    compared = 0
    for process, growth in zip(summary["processes"], leaks["processes"], strict=True):
        rank, events = process["rank"], process["events"]
        ooms = events.get("oom", 0)
        expected = (
            *(process["rows"], process["lost_events"], int(process["complete"]), process["duration_ns"]),
            *(ooms, max(0, process["failed_calls"] - ooms), growth["finished_steps"]),
            *(growth["growth_bytes_per_step"], growth["growth_r2"]),
            *(growth["held_at_end_blocks"], growth["held_at_end_bytes"]),
        )
        columns = (
            "rows, lost_events, complete, to_ns, ooms, retries, steps, bytes_per_step, r2, blocks, bytes"
        )
        assert ask(columns, "process", rank) == [expected]
        names = (
            "category, phase, op, module, bytes, blocks, bytes_per_step, r2, first_step, last_step, "
            "steps, line"
        )
        wanted = [tuple(leak[name] for name in names.split(", ")) for leak in growth["leaks"]]
        assert sorted(map(str, ask(names, "leak", rank))) == sorted(map(str, wanted))
        for device in process["devices"]:
            ordinal, peak = device["device"], device["peak_allocated"]
            here = f"and device = {ordinal}"
            names = (
                "peak_allocated_bytes, peak_ns, step, coalesce(phase, ''), coalesce(op, ''), "
                "coalesce(module, ''), peak_reserved_bytes, peak_used_bytes, end_allocated_bytes, "
                "end_reserved_bytes"
            )
            texts = [peak[name].replace("(none)", "") for name in ("phase", "op", "module")]
            others = [device[name]["bytes"] for name in ("peak_reserved", "peak_used")]
            ends = [device[name] for name in ("at_end_allocated_bytes", "at_end_reserved_bytes")]
            expected = (peak["bytes"], peak["ts_ns"], peak["step"], *texts, *others, *ends)
            assert ask(names, "device", rank, here) == [expected], (
                expected,
                ask(names, "device", rank, here),
            )
            owners = collections.Counter()
            for category, size in ask("category, bytes", "owner", rank, here):
                owners[category.removesuffix(" *")] += size
            assert owners == device["at_peak_by_category_bytes"], owners
            pairs = {
                "frag_reserved_bytes": "reserved_bytes",
                "frag_requested_bytes": "requested_bytes",
                "frag_rounding_bytes": "rounding_bytes",
                "frag_pending_bytes": "pending_bytes",
                "frag_hole_bytes": "hole_bytes",
                "frag_empty_segment_bytes": "empty_segment_bytes",
                "frag_largest_free_bytes": "largest_free_bytes",
            }
            held = [found for found in frag["devices"] if (found["rank"], found["device"]) == (rank, ordinal)]
            wanted = [tuple(found[name] for name in pairs.values()) for found in held]
            reported = [row for row in ask(", ".join(pairs), "device", rank, here) if row[0] is not None]
            assert reported == wanted, (reported, wanted)
        columns = "peak_allocated_bytes, peak_reserved_bytes, end_allocated_bytes, end_reserved_bytes"
        reported = {
            (device, step): figures
            for device, step, *figures in ask(f"device, step, {columns}", "step", rank)
        }
        four_parts(growth, lambda columns, kind, more="", rank=rank: ask(columns, kind, rank, more))
        assert reported == steps_of(traces[rank]), (reported, steps_of(traces[rank]))
        compared += len(reported)
    # No fixture has a detail schedule, so all steps are detailed.
    detailed = duckdb.sql(f"select distinct detailed from {table} where kind = 'step'").fetchall()
    assert detailed in ([], [(1,)]), detailed
    print(len(summary["processes"]), "digests equal the reports, with", compared, "steps")


def sql(folder, *queries):
    """Prints the rows of each query."""
    import os

    import duckdb

    os.chdir(folder)
    for query in queries:
        for row in duckdb.sql(query).fetchall():
            print(*row, sep="\t")


def schema(schema, *paths):
    import jsonschema

    schema = json.loads(Path(schema).read_text())
    for path in paths:
        jsonschema.validate(json.loads(Path(path).read_text()), schema)
    # The schema must reject a broken profile, or the check above proves nothing.
    broken = json.loads(Path(paths[0]).read_text())
    del broken["profiles"][0]["weights"]
    try:
        jsonschema.validate(broken, schema)
    except jsonschema.ValidationError:
        print(len(paths), "profiles are valid")
    else:
        raise AssertionError("the schema takes a profile without weights")


globals()[sys.argv[1]](*sys.argv[2:])
