"""Answers the benchmark's questions with DuckDB: ask_duckdb.py summary|peak TRACE.

The fastest form tried: one pass copies the columns of the question into a table, in any row order, and many
small queries read that table. Also tried: a pass over the file per question, a table in file order, and
`arg_max` of columns or of structs.
"""

import json
import sys

import duckdb

PEAK_COLUMNS = "seq, ts_ns, device, event, requested_bytes, delta_bytes, allocated_bytes"
PEAK_COLUMNS += ", op, module, phase, category, step"
COLUMNS = {"peak": PEAK_COLUMNS, "summary": f"{PEAK_COLUMNS}, status, active_bytes, reserved_bytes"}

NOBODY = "op = '(none)' and module = '(none)' and category = '(none)'"
OUTSIDE = "event in ('ext_alloc', 'ext_free')"
COMMON = f"""
    coalesce(sum(requested_bytes) filter (event = 'lost'), 0)::bigint lost_events,
    coalesce(sum(delta_bytes) filter (event in ('alloc', 'tag') and {NOBODY}), 0)
        / sum(delta_bytes) filter (event in ('alloc', 'tag')) unattributed_share_ever"""


def ask(query):
    """Returns the rows as dicts."""
    answer = duckdb.execute(query)
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row)) for row in answer.fetchall()]


def moments(totals):
    """Returns, for each total, the first GPU row with its maximum. (`arg_max` may return any such row.)"""
    tops = ", ".join(f"max({total}) {name}" for name, total in totals.items())
    tops = ask(f"select {tops} from t where device >= 0")[0]
    at = ", ".join(f"min(seq) filter ({total} = {tops[name]}) {name}" for name, total in totals.items())
    at = ask(f"select {at} from t where device >= 0")[0]
    rows = ask(f"select seq, ts_ns, step, phase, module, op from t where seq in {(*at.values(),)}")
    rows = {row["seq"]: row for row in rows}
    return {name: {"bytes": tops[name]} | rows[at[name]] for name in totals}


def live(by, at, what):
    """Returns the live memory at `at`, grouped by `by`."""
    blocks = f"seq <= {at} and event in ('alloc', 'free', 'tag', 'live')"
    return ask(f"select {by}, sum(delta_bytes)::bigint bytes, {what} from t where {blocks} group by {by}")


def summary():
    used = "reserved_bytes"
    if ask(f"select count(*) rows from t where {OUTSIDE}")[0]["rows"]:
        # The running sum costs a sort, so skip it if there is no memory outside PyTorch.
        outside = (
            f"sum(case when {OUTSIDE} then delta_bytes else 0 end) "
            "over (order by seq rows unbounded preceding)"
        )
        duckdb.execute(
            f"create or replace temp table t as select *, reserved_bytes + {outside} used_bytes from t"
        )
        used = "used_bytes"
    answer = moments(
        {
            "peak_allocated": "allocated_bytes",
            "peak_active": "active_bytes",
            "peak_reserved": "reserved_bytes",
            "peak_used": used,
        }
    )
    answer |= ask(f"""select
        coalesce(max(allocated_bytes) filter (device < 0), 0) pinned_peak_bytes,
        count(*) as rows,
        count(*) filter (status <> 0) failed_calls,
        max(step) filter (step >= 0) - min(step) filter (step >= 0) + 1 steps,
        max(ts_ns) duration_ns,
        max(seq) filter (event = 'end') is not distinct from max(seq) complete,
        {COMMON} from t""")[0]
    last = "(select max(seq) from t where device >= 0)"
    last = (
        "allocated_bytes at_end_allocated_bytes, reserved_bytes at_end_reserved_bytes "
        f"from t where seq = {last}"
    )
    categories = live(
        "category",
        answer["peak_allocated"]["seq"],
        f"coalesce(sum(delta_bytes) filter ({NOBODY}), 0)::bigint nobody",
    )
    share = sum(row["nobody"] for row in categories) / sum(row["bytes"] for row in categories)
    return (
        answer
        | ask(f"select {last}")[0]
        | {
            "events": {
                row["event"]: row["rows"]
                for row in ask("select event, count(*) as rows from t group by event")
            },
            "at_peak_by_category_bytes": {
                row["category"]: row["bytes"] for row in categories if row["bytes"]
            },
            "unattributed_share": share,
        }
    )


def peak():
    top = moments({"peak": "allocated_bytes"})["peak"]
    modules = live("module", top["seq"], "sum(sign(delta_bytes))::bigint blocks")
    groups = {row.pop("module"): row for row in modules if row["blocks"] > 0}
    return ask(f"select {COMMON} from t")[0] | {
        "peak": top,
        "live_bytes": sum(group["bytes"] for group in groups.values()),
        "groups": groups,
    }


question, path = sys.argv[1:]
duckdb.execute("set preserve_insertion_order = false")
duckdb.execute(f"create temp table t as select {COLUMNS[question]} from '{path}'")
print(json.dumps({"summary": summary, "peak": peak}[question]()))
