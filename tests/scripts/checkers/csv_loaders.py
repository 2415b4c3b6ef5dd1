"""Reads a trace with pandas, polars and DuckDB, without options, and compares the typed columns.

csv_loaders.py TRACE PEAK

The folder of TRACE has no other trace. PEAK is the answer of `memtrace peak --by phase --as-of --json`.
"""

import glob
import json
import pathlib
import sys

import duckdb
import pandas
import polars

path = sys.argv[1]
TEXT = {"event", "api", "source", "op", "module", "phase", "category", "name", "dtype", "shape"}

frames = {
    "pandas": pandas.read_csv(path),
    "polars": polars.read_csv(path).to_pandas(),
    "duckdb": duckdb.read_csv(path).df(),
}
types = {
    "pandas": {name: str(kind) for name, kind in frames["pandas"].dtypes.items()},
    "polars": {name: str(kind) for name, kind in polars.read_csv(path).schema.items()},
    "duckdb": dict(zip(duckdb.read_csv(path).columns, map(str, duckdb.read_csv(path).types))),
}
expected = {"pandas": ("int64", "str"), "polars": ("Int64", "String"), "duckdb": ("BIGINT", "VARCHAR")}

first = frames["pandas"]
for loader, frame in frames.items():
    assert list(frame.columns) == list(first.columns), (loader, list(frame.columns))
    assert len(frame) == len(first), (loader, len(frame), len(first))
    for column in frame.columns:
        kind = expected[loader][column in TEXT]
        found = types[loader][column]
        assert found == kind or (kind == "str" and found == "object"), (loader, column, found)
        assert not frame[column].isna().any(), (loader, column)
        differs = frame[column].astype(str) != first[column].astype(str)
        assert not differs.any(), (loader, column, frame[differs].iloc[0], first[differs].iloc[0])

# Checks a promise of docs/trace-format.md: over any prefix of the rows, a groupby gives the live memory by
# owner, and the sum is the total of the device.
block_rows = first[first.event.isin(["alloc", "free", "tag", "live", "brief"])]
for until in (len(block_rows) // 3, len(block_rows) // 2, len(block_rows)):
    # A tag has two rows, so a prefix that ends with the first of them gets the second, too.
    last = block_rows.iloc[until - 1]
    prefix = block_rows.iloc[: until + int(last.event == "tag" and last.delta_bytes < 0)]
    total = prefix.allocated_bytes.iloc[-1]
    for owner in ("module", "phase", "op", "category", "step"):
        live = prefix.groupby(owner).delta_bytes.sum()
        assert live.sum() == total, (owner, live, total)
        assert (live >= 0).all(), (owner, live)
    events = "('alloc', 'free', 'tag', 'live', 'brief')"
    last = prefix.seq.iloc[-1]
    query = f"select sum(delta_bytes) from '{path}' where event in {events} and seq <= {last}"
    assert duckdb.sql(query).fetchall()[0][0] == total

# The groupby over the rows up to the peak, the example of the README, must equal `memtrace peak --by phase
# --as-of`.
at_peak = block_rows[block_rows.seq <= block_rows.seq[block_rows.allocated_bytes.idxmax()]]
sums = {
    "(no phase)" if owner == "(none)" else owner: int(live)
    for owner, live in at_peak.groupby("phase").delta_bytes.sum().items()
}
groups = {
    group["key"]: group["bytes"] for group in json.loads(pathlib.Path(sys.argv[2]).read_text())["groups"]
}
assert {owner: live for owner, live in sums.items() if live} == groups, (sums, groups)

# Read all traces of a folder at once. The stacks are next to them, and are read as CSV by their own names.
folder = pathlib.Path(path).parent
pattern = str(folder / "*.csv")
assert list(folder.glob("*.stacks")), "the trace has stacks"
assert duckdb.sql(f"select count(*) from '{pattern}'").fetchall()[0][0] == len(first)
assert polars.scan_csv(pattern).collect().height == len(first)
assert len(pandas.concat(pandas.read_csv(file) for file in glob.glob(pattern))) == len(first)
stacks = next(folder.glob("*.stacks"))
by_stack = duckdb.sql(
    f"select count(*) from '{pattern}' rows"
    f" join read_csv('{stacks}') stacks on rows.stack_id = stacks.stack_id"
).fetchall()[0][0]
assert by_stack == (first.stack_id > 0).sum(), by_stack
print(len(first), "rows read alike by", ", ".join(frames))
