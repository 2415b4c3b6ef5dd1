"""The numbers that the reports must show, computed with pandas and no code of memtrace's.

expected.py FIXTURES > expected.json
"""

import json
import pathlib
import sys

import pandas as pd

BLOCKS = ["alloc", "free", "tag", "live"]
SMALL_SEGMENT = 2 << 20


def read(path):
    return pd.read_csv(path)


def gpu(rows, device=0):
    return rows[rows.device == device]


def used(rows):
    """Reserved by torch, and what is live outside it."""
    outside = rows.delta_bytes.where(rows.event.isin(["ext_alloc", "ext_free"]), 0).cumsum()
    totals = rows[rows.event.isin(["alloc", "free", "segment_alloc", "segment_free", "oom", "ext_alloc", "ext_free"])]
    return totals.reserved_bytes + outside[totals.index]


def live_at(rows, seq):
    """The allocations whose block is live after the row `seq`."""
    born = rows[(rows.event == "alloc") & (rows.seq <= seq) & (rows.alloc_id != 0)]
    gone = rows[(rows.event == "free") & (rows.seq <= seq)].alloc_id
    return born[~born.alloc_id.isin(gone)]


def peak(rows, column="allocated_bytes"):
    row = rows.loc[rows[column].idxmax()]
    return {"bytes": int(row[column]), "seq": int(row.seq), "step": int(row.step), "op": row.op, "phase": row.phase}


def by(rows, column):
    """Live memory by owner: what the deltas of a prefix of the block rows sum to, with no join."""
    sums = rows.groupby(column).delta_bytes.sum()
    return {str(key): int(value) for key, value in sums.items() if value}


def rows_with_steps(rows):
    """The step that runs at each row: the row of a free has its block's."""
    own = rows.step.where(~rows.event.isin(["free", "free_completed", "tag", "ext_free", "host_free"]))
    return own.ffill().fillna(-1).astype(int)


def top_ops(rows):
    """MemoryTracker's: what each op added to the total at the end of the op before."""
    device = rows[rows.device == 0]
    total = device[device.event.isin(["alloc", "free", "segment_alloc", "segment_free", "oom"])].set_index("seq").allocated_bytes
    total = total.reindex(rows.seq).ffill().fillna(0).astype(int)
    ops = rows[rows.event == "op"].copy()
    ops["allocated"] = total.loc[ops.seq].to_numpy()
    ops["delta"] = ops.allocated.diff()
    ops["index"] = range(len(ops))
    top = ops.dropna(subset=["delta"]).sort_values("delta", ascending=False, kind="stable").head(20)
    return {
        "op_calls": len(ops),
        "top": [[int(row["index"]), row.op, int(row.delta)] for _, row in top.iterrows()],
    }


def leaks(rows):
    """Survivors of their step when the last step begins, with a line through their running sum."""
    rows = rows.assign(now=rows_with_steps(rows))
    last = int(rows.step.max())
    start = rows[rows.step >= last].seq.min()
    live = live_at(gpu(rows), start - 1)
    live = live[live.step >= 0]
    found = []
    for (op, module), blocks in live.groupby(["op", "module"]):
        steps = blocks.groupby("step").delta_bytes.sum()
        if len(steps) < 3:
            continue
        sums = steps.reindex(range(steps.index.min(), steps.index.max() + 1), fill_value=0).cumsum()
        x = sums.index.to_numpy(dtype=float)
        slope = float(((x - x.mean()) * (sums - sums.mean())).sum() / ((x - x.mean()) ** 2).sum())
        found.append({"op": op, "module": module, "bytes": int(blocks.delta_bytes.sum()), "slope": slope})
    return sorted(found, key=lambda leak: -leak["slope"])


def ever(rows):
    """The bytes of all blocks: those that nothing says the owner of by the row that told it last, and all."""
    told = gpu(rows)[lambda r: r.event.isin(["alloc", "tag"]) & (r.alloc_id != 0) & (r.delta_bytes > 0)]
    born = told[told.event == "alloc"].set_index("alloc_id").delta_bytes
    last = told.groupby("alloc_id")[["op", "module", "category"]].last()
    nobody = last[(last == "(none)").all(axis=1)].index
    return [int(born[born.index.isin(nobody)].sum()), int(born.sum())]


def segments(rows, seq):
    rows = rows[rows.seq <= seq]
    alive = {}
    for row in rows[rows.event.isin(["segment_alloc", "segment_free"]) & (rows.status == 0)].itertuples():
        if row.event == "segment_alloc":
            alive[row.addr] = row.delta_bytes
        else:
            del alive[row.addr]
    return alive


def holes(rows, seq):
    """For each segment: its size, the blocks in it, and the pieces between them."""
    live = live_at(rows, seq).sort_values("addr")
    found = []
    for addr, size in sorted(segments(rows, seq).items()):
        inside = live[(live.addr >= addr) & (live.addr < addr + size)]
        edge, pieces = addr, []
        for block in inside.itertuples():
            if block.addr > edge:
                pieces.append(block.addr - edge)
            edge = block.addr + block.delta_bytes
        if edge < addr + size:
            pieces.append(addr + size - edge)
        found.append((size, len(inside), pieces))
    return found


def frag(rows):
    rows = gpu(rows)
    at = int(rows.loc[rows.reserved_bytes.idxmax()].seq)
    # The block that the segment was taken for comes after it.
    after = rows[(rows.seq > at) & rows.event.isin(["alloc", "oom"])].seq
    at = int(after.min()) if len(after) else int(rows.seq.max())
    live = live_at(rows, at)
    found = holes(rows, at)
    requested = live.requested_bytes.where(live.requested_bytes >= 0, live.delta_bytes)
    return {
        "reserved": sum(size for size, _, _ in found),
        "allocated": int(live.delta_bytes.sum()),
        "requested": int(requested.sum()),
        "holes": sum(sum(pieces) for _, blocks, pieces in found if blocks),
        "empty": sum(size for size, blocks, _ in found if not blocks),
        "largest": max((piece for _, _, pieces in found for piece in pieces), default=0),
        "pinned": sorted((sum(pieces) for _, blocks, pieces in found if blocks and pieces), reverse=True),
    }


def oom(rows):
    ooms = rows[rows.event == "oom"]
    if ooms.empty:
        return None
    row = ooms.iloc[-1]
    device = gpu(rows)
    small = row.rounded_bytes <= 1 << 20
    usable = [
        piece
        for size, _, pieces in holes(device, row.seq)
        if (size == SMALL_SEGMENT) == small
        for piece in pieces
    ]
    outside = device[device.event.isin(["ext_alloc", "ext_free"]) & (device.seq <= row.seq)].delta_bytes.sum()
    return {
        "rounded": int(row.rounded_bytes),
        "allocated": int(row.allocated_bytes),
        "reserved": int(row.reserved_bytes),
        "largest": max(usable, default=0),
        "pieces": len(usable),
        "outside": int(outside),
    }


def stats(rows):
    device = gpu(rows)
    born = device[(device.event == "alloc") & (device.alloc_id != 0)]
    freed = device[device.event == "free"].merge(born, on="alloc_id", suffixes=("", "_born"))
    # A free happens in the step and phase of the last allocation before it.
    during = born[["seq", "step", "phase"]].rename(columns={"step": "now_step", "phase": "now_phase"})
    freed = pd.merge_asof(freed.sort_values("seq"), during.sort_values("seq"), on="seq")
    same = freed[(freed.now_step == freed.step_born) & (freed.now_phase == freed.phase_born)]
    known = born[born.requested_bytes >= 0]
    quantile = lambda values, q: int(values.quantile(q, interpolation="lower"))
    return {
        "blocks": len(born),
        "bytes": int(born.delta_bytes.sum()),
        "rounding": int((known.delta_bytes - known.requested_bytes).sum()),
        "block_p50": quantile(born.delta_bytes, 0.5),
        "block_max": int(born.delta_bytes.max()),
        "lifetimes": len(freed),
        "lifetime_p50": quantile(freed.ts_ns - freed.ts_ns_born, 0.5),
        "temporaries": [len(same), int(-same.delta_bytes.sum())],
    }


def highest(rows, column, key, below=False):
    """The highest live bytes of an owner at any moment."""
    blocks = gpu(rows)[lambda r: r.event.isin(BLOCKS)]
    own = blocks[column] == key
    if below:
        own |= blocks[column].str.startswith(key + ".")
    return int(max(blocks.delta_bytes.where(own, 0).cumsum().max(), 0))


def ranks(all_rows):
    """The first module, in rank 0's order, that another rank gives other memory."""
    def work(rows):
        born = gpu_of(rows)[lambda r: r.event == "alloc"]
        return born.groupby(["phase", "module"], sort=False).delta_bytes.agg(["count", "sum"])

    def gpu_of(rows):
        return rows[rows.device >= 0]

    peaks = [int(gpu_of(rows).allocated_bytes.max()) for rows in all_rows]
    first = work(all_rows[0])
    for rank, rows in enumerate(all_rows[1:], start=1):
        other = work(rows)
        for key in first.index:
            if key not in other.index or tuple(first.loc[key]) != tuple(other.loc[key]):
                return {"peaks": peaks, "ranks": [0, rank], "at": list(key)}
    return {"peaks": peaks, "ranks": None, "at": None}


def one(rows):
    device = gpu(rows)
    top = peak(device)
    live = device[device.event.isin(BLOCKS) & (device.seq <= top["seq"])]
    assert live.delta_bytes.sum() == live_at(device, top["seq"]).delta_bytes.sum() == top["bytes"]
    end = device[device.event.isin(BLOCKS)]
    return {
        "rows": len(rows),
        "peak_allocated": top,
        "peak_reserved": peak(device, "reserved_bytes")["bytes"],
        "peak_used": int(used(device).max()),
        "live": {column: by(live, column) for column in ["module", "op", "phase", "category", "step"]},
        "ever": ever(rows),
        "at_end": by(end, "category"),
        "top_ops": top_ops(rows),
        "leaks": leaks(rows),
        "frag": frag(rows),
        "oom": oom(rows),
        "stats": stats(rows),
    }


def main():
    folder = pathlib.Path(sys.argv[1])
    expected = {}
    for name in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        traces = [read(path) for path in sorted((folder / name).glob("*.csv.gz"))]
        expected[name] = one(traces[0])
        if len(traces) > 1:
            expected[name]["ranks"] = ranks(traces)
    gpt = read(next((folder / "gpt").glob("*.csv.gz")))
    expected["gpt"]["highest"] = {
        "module GPT.h": highest(gpt, "module", "GPT.h", below=True),
        "category activation": highest(gpt, "category", "activation"),
        "phase backward": int(gpt[(gpt.event == "alloc") & (gpt.phase == "backward")].allocated_bytes.max()),
    }
    json.dump(expected, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
