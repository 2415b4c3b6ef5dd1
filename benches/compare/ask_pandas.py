"""Answers the benchmark's questions with pandas and its defaults: ask_pandas.py summary|peak TRACE."""

import json
import sys

import numpy as np
import pandas as pd

NONE = "(none)"


def moment(t, total):
    row = t.loc[total.idxmax()]
    return {"bytes": total.max()} | {
        name: row[name] for name in ["seq", "ts_ns", "step", "phase", "module", "op"]
    }


def nobody(rows):
    """Returns the bytes without an owner in any column."""
    return rows.delta_bytes[(rows.op == NONE) & (rows.module == NONE) & (rows.category == NONE)].sum()


def prefix(t, at):
    """Returns the rows whose deltas sum to the memory live at `at`."""
    return t[(t.seq <= at) & t.event.isin(["alloc", "free", "tag", "live"])]


def lost(t):
    return t.requested_bytes[t.event == "lost"].sum()


def unattributed_ever(t):
    given = t[t.event.isin(["alloc", "tag"])]
    return nobody(given) / given.delta_bytes.sum()


def summary(t):
    gpu = t.device >= 0
    outside = t.delta_bytes.where(t.event.isin(["ext_alloc", "ext_free"]), 0).cumsum()
    allocated, reserved = t.allocated_bytes[gpu], t.reserved_bytes[gpu]
    peak_allocated = moment(t, allocated)
    blocks = prefix(t, peak_allocated["seq"])
    live = blocks.groupby("category").delta_bytes.sum()
    steps = t.step[t.step >= 0]
    return {
        "peak_allocated": peak_allocated,
        "peak_active": moment(t, t.active_bytes[gpu]),
        "peak_reserved": moment(t, reserved),
        "peak_used": moment(t, reserved + outside[gpu]),
        "at_peak_by_category_bytes": live[live != 0].to_dict(),
        "at_end_allocated_bytes": allocated.iloc[-1],
        "at_end_reserved_bytes": reserved.iloc[-1],
        "pinned_peak_bytes": t.allocated_bytes[~gpu].max() if not gpu.all() else 0,
        "rows": len(t),
        "events": t.event.value_counts().to_dict(),
        "failed_calls": (t.status != 0).sum(),
        "lost_events": lost(t),
        "steps": steps.max() - steps.min() + 1,
        "duration_ns": t.ts_ns.max(),
        "complete": bool(t.event.iloc[-1] == "end"),
        "unattributed_share": nobody(blocks) / live.sum(),
        "unattributed_share_ever": unattributed_ever(t),
    }


def peak(t):
    top = moment(t, t.allocated_bytes[t.device >= 0])
    blocks = prefix(t, top["seq"])
    live = (
        blocks.assign(blocks=np.sign(blocks.delta_bytes)).groupby("module")[["delta_bytes", "blocks"]].sum()
    )
    live = live[live.blocks > 0].rename(columns={"delta_bytes": "bytes"})
    return {
        "peak": top,
        "live_bytes": live.bytes.sum(),
        "groups": live.to_dict("index"),
        "lost_events": lost(t),
        "unattributed_share_ever": unattributed_ever(t),
    }


question, path = sys.argv[1:]
t = pd.read_csv(path)
print(json.dumps({"summary": summary, "peak": peak}[question](t), default=lambda number: number.item()))
