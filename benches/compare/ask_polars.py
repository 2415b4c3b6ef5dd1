"""Answers the benchmark's questions with polars: ask_polars.py eager|projected summary|peak TRACE.

The fastest form tried is `projected`: one pass over the columns of the question. Also tried: everything lazy
and streaming with a pass per question; everything in memory; strings as they are or as categoricals.
"""

import json
import sys

import polars as pl
from polars import col

NONE = "(none)"
PEAK_COLUMNS = ["seq", "ts_ns", "device", "event", "requested_bytes", "delta_bytes", "allocated_bytes"]
PEAK_COLUMNS += ["op", "module", "phase", "category", "step"]
COLUMNS = {"peak": PEAK_COLUMNS, "summary": PEAK_COLUMNS + ["status", "active_bytes", "reserved_bytes"]}
TEXTS = ["event", "op", "module", "phase", "category"]

NOBODY = (col("op") == NONE) & (col("module") == NONE) & (col("category") == NONE)
GIVEN = col("event").is_in(["alloc", "tag"])
GPU = col("device") >= 0
DELTA = col("delta_bytes")


def first(total):
    """Returns the first GPU row with the highest total. (`arg_max` may return any such row.)"""
    return pl.struct(
        total.filter(GPU).max().alias("bytes"),
        col("seq").filter(GPU & (total == total.filter(GPU).max())).min(),
    )


def moment(t, top):
    row = t.row(by_predicate=col("seq") == top["seq"], named=True)
    return {"bytes": top["bytes"]} | {
        name: row[name] for name in ["seq", "ts_ns", "step", "phase", "module", "op"]
    }


def prefix(t, at):
    """Returns the rows whose deltas sum to the memory live at `at`."""
    return t.lazy().filter((col("seq") <= at) & col("event").is_in(["alloc", "free", "tag", "live"]))


COMMON = {
    "lost_events": col("requested_bytes").filter(col("event") == "lost").sum(),
    "unattributed_share_ever": DELTA.filter(GIVEN & NOBODY).sum() / DELTA.filter(GIVEN).sum(),
}


def summary(t):
    outside = (
        pl.when(col("event").is_in(["ext_alloc", "ext_free"])).then("delta_bytes").otherwise(0).cum_sum()
    )
    step = col("step").filter(col("step") >= 0)
    facts = t.with_columns(used_bytes=col("reserved_bytes") + outside).select(
        **{
            f"peak_{name}": first(col(f"{name}_bytes"))
            for name in ["allocated", "active", "reserved", "used"]
        },
        at_end_allocated_bytes=col("allocated_bytes").filter(GPU).last(),
        at_end_reserved_bytes=col("reserved_bytes").filter(GPU).last(),
        pinned_peak_bytes=col("allocated_bytes").filter(~GPU).max().fill_null(0),
        rows=pl.len(),
        failed_calls=(col("status") != 0).sum(),
        steps=step.max() - step.min() + 1,
        duration_ns=col("ts_ns").max(),
        complete=col("event").last() == "end",
        **COMMON,
    )
    answer = facts.row(0, named=True)
    for name in ["peak_allocated", "peak_active", "peak_reserved", "peak_used"]:
        answer[name] = moment(t, answer[name])
    live = prefix(t, answer["peak_allocated"]["seq"]).group_by("category")
    live = live.agg(DELTA.sum(), DELTA.filter(NOBODY).sum().alias("nobody")).collect()
    return answer | {
        "at_peak_by_category_bytes": {category: bytes for category, bytes, _ in live.rows() if bytes},
        "events": dict(t["event"].value_counts().rows()),
        "unattributed_share": live["nobody"].sum() / live["delta_bytes"].sum(),
    }


def peak(t):
    answer = t.select(peak=first(col("allocated_bytes")), **COMMON).row(0, named=True)
    top = moment(t, answer["peak"])
    live = prefix(t, top["seq"]).group_by("module").agg(bytes=DELTA.sum(), blocks=DELTA.sign().sum())
    live = live.filter(col("blocks") > 0).collect()
    groups = {module: {"bytes": bytes, "blocks": blocks} for module, bytes, blocks in live.rows()}
    return answer | {"peak": top, "live_bytes": live["bytes"].sum(), "groups": groups}


form, question, path = sys.argv[1:]
if form == "eager":
    t = pl.read_csv(path)
else:
    t = pl.scan_csv(path, schema_overrides=dict.fromkeys(TEXTS, pl.Categorical))
    t = t.select(COLUMNS[question]).collect(engine="streaming")
print(json.dumps({"summary": summary, "peak": peak}[question](t)))
