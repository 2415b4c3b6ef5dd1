"""Times `memtrace summary` and `peak --by module` against pandas, polars and DuckDB on one trace.

compare.py MEMTRACE TRACE [ROUNDS]

Each runs in a process of its own, once to warm the page cache and then ROUNDS times (3); the best
counts. The others answer the same two questions: the highest `allocated_bytes` and `reserved_bytes`
with their rows and the rows by event; and the bytes live at that peak by module, which needs no join
(`groupby` over a prefix of the rows). pandas reads with its defaults; polars and DuckDB in their best
form, which reads only the columns of the question.
"""

import json
import os
import subprocess
import sys
import time

SUMMARY_COLUMNS = ["seq", "ts_ns", "event", "step", "phase", "module", "op", "allocated_bytes", "reserved_bytes"]
PEAK_COLUMNS = ["seq", "event", "module", "delta_bytes", "allocated_bytes"]

PROGRAMS = {
    "pandas, default": {
        "summary": """
import pandas as pd
t = pd.read_csv(path)
a, r = t.loc[t.allocated_bytes.idxmax()], t.loc[t.reserved_bytes.idxmax()]
print(a.allocated_bytes, a.seq, r.reserved_bytes, t.event.value_counts().to_dict())
""",
        "peak": """
import pandas as pd
t = pd.read_csv(path)
at = t.seq[t.allocated_bytes.idxmax()]
b = t[(t.seq <= at) & t.event.isin(["alloc", "free", "tag", "live"])]
print(b.groupby("module").delta_bytes.sum().nlargest(20).to_dict())
""",
    },
    "polars, eager": {
        "summary": """
import polars as pl
t = pl.read_csv(path)
a, r = t.row(t["allocated_bytes"].arg_max(), named=True), t.row(t["reserved_bytes"].arg_max(), named=True)
print(a["allocated_bytes"], a["seq"], r["reserved_bytes"], t["event"].value_counts())
""",
        "peak": """
import polars as pl
t = pl.read_csv(path)
at = t["seq"][t["allocated_bytes"].arg_max()]
b = t.filter((pl.col("seq") <= at) & pl.col("event").is_in(["alloc", "free", "tag", "live"]))
print(b.group_by("module").agg(pl.col("delta_bytes").sum()).sort("delta_bytes", descending=True).head(20))
""",
    },
    "polars, projected": {
        "summary": f"""
import polars as pl
t = pl.scan_csv(path).select({SUMMARY_COLUMNS}).collect(engine="streaming")
a, r = t.row(t["allocated_bytes"].arg_max(), named=True), t.row(t["reserved_bytes"].arg_max(), named=True)
print(a["allocated_bytes"], a["seq"], r["reserved_bytes"], t["event"].value_counts())
""",
        "peak": f"""
import polars as pl
t = pl.scan_csv(path).select({PEAK_COLUMNS}).collect(engine="streaming")
at = t["seq"][t["allocated_bytes"].arg_max()]
b = t.filter((pl.col("seq") <= at) & pl.col("event").is_in(["alloc", "free", "tag", "live"]))
print(b.group_by("module").agg(pl.col("delta_bytes").sum()).sort("delta_bytes", descending=True).head(20))
""",
    },
    "DuckDB": {
        "summary": """
import duckdb
print(duckdb.sql(f"select max(allocated_bytes), arg_max(seq, allocated_bytes), arg_max(step, allocated_bytes), "
                 f"arg_max(op, allocated_bytes), arg_max(module, allocated_bytes), max(reserved_bytes), "
                 f"arg_max(seq, reserved_bytes), count(*) from '{path}'").fetchall())
""",
        "peak": """
import duckdb
duckdb.sql(f"create temp table t as select seq, event, module, delta_bytes, allocated_bytes from '{path}'")
print(duckdb.sql("select module, sum(delta_bytes) b from t where seq <= (select arg_min(seq, -allocated_bytes) from t) "
                 "and event in ('alloc', 'free', 'tag', 'live') group by module order by b desc limit 20").fetchall())
""",
    },
}


def run(command):
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = process.stdout.read()
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{command[0]} failed: {error.decode()}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def main():
    memtrace, trace, *rest = sys.argv[1:]
    rounds = int(rest[0]) if rest else 3
    ways = {
        "memtrace": {
            "summary": [memtrace, "summary", trace, "--json"],
            "peak": [memtrace, "peak", trace, "--by", "module", "--json"],
        }
    }
    for name, programs in PROGRAMS.items():
        ways[name] = {
            question: [sys.executable, "-c", f"path = {trace!r}\n{program}"] for question, program in programs.items()
        }
    size = os.path.getsize(trace)
    print(f"{trace}: {size / 1e9:.2f} GB, {os.cpu_count()} cores, best of {rounds}\n")
    results = {}
    for question in ["summary", "peak"]:
        print(f"{question:20} {'wall':>8} {'cpu':>8} {'memory':>10} {'of memtrace':>12}")
        base = None
        for name, commands in ways.items():
            run(commands[question])
            seconds, cpu, mib, _ = min(run(commands[question]) for _ in range(rounds))
            base = base or seconds
            results[f"{question}/{name}"] = {"seconds": seconds, "cpu_seconds": cpu, "mib": mib}
            print(f"{name:20} {seconds:7.2f}s {cpu:7.2f}s {mib:7.0f}MiB {seconds / base:11.1f}x", flush=True)
        print()
    if os.environ.get("JSON"):
        print(json.dumps(results))


if __name__ == "__main__":
    main()
