"""Loads the digests of a job into tables of DuckDB. A digest that cannot be read is left out and reported.

`digests` has the rows of processes, devices and leaks. `steps` has the rows of steps. If there are
many steps, neighboring steps share a row, because ten thousand ranks with ten thousand steps would
have a hundred million rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._text import first_line

# The columns that the answers need. A column that an older digest lacks is null.
_INTEGERS = (
    "rank",
    "world_size",
    "device",
    "step",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_used_bytes",
    "capacity_bytes",
    "ooms",
    "retries",
    "lost_events",
    "complete",
)
_TEXTS = ("kind", "host", "run_id", "phase", "op", "module", "category", "line")
_FLOATS = ("bytes_per_step",)
# The number of files per statement. If one file is damaged, the files of its batch
# are read again, one by one.
_BATCH = 50
# The maximum number of rows of a digest. A small file can have any number of rows, and one row of a step
# takes up to 500 bytes.
MOST_ROWS = 1_000_000
# The maximum number of groups of neighboring steps: more than a screen has columns.
GROUPS = 512
# Keep DuckDB from taking all memory of the machine, and from filling the disk.
SETTINGS = {"memory_limit": "50%", "temp_directory": ""}

_READ = f"""(
    select * from no_rows union all by name
    select columns('^({"|".join(_INTEGERS + _TEXTS + _FLOATS)})$'), filename as source
    from read_parquet($files, union_by_name = true, filename = true, hive_partitioning = false)
)"""
# In the tables, a process without a rank has rank -1.
_ADD_OTHERS = f"""
insert into digests by name select * replace (coalesce(rank::bigint, -1) as rank)
from {_READ} where kind in ('process', 'device', 'leak')
"""
_COUNT_ROWS = """
select file_name, sum(row_group_num_rows) from parquet_metadata($files) where column_id = 0 group by file_name
"""
# Selects the rows that are compared: rows of numbered steps with a peak.
_IS_STEP = "kind = 'step' and step is not null and peak_allocated_bytes is not null"
_COUNT_STEPS = f"""
create or replace table known as
select step, sum(digests)::bigint as digests from (
    from known union all
    select step::bigint, count(distinct source) from {_READ} where {_IS_STEP} group by all
) group by step
"""
# All groups have the same number of steps, whatever the steps' numbers: a resumed job may begin at any step.
# A step is rare if at most half as many digests have it as the most common step. Rare steps take at most half
# of the groups, so a digest with false steps hardly affects the others. Steps before the first one form their
# own group.
_GROUP_STEPS = f"""
create table groups as
with counted as (
    select step, digests * 2 > max(digests) over () as is_common from known where step >= 0
), total as (
    select count(*) as steps, count(*) filter (is_common) as common, steps - common as rare from counted
), weighed as (
    select step, case when is_common or steps < {GROUPS} then 1 else least(1, common / rare) end as weight
    from counted, total
), placed as (
    select step, sum(weight) over (order by step) - weight as place from weighed
), width as (
    select case when steps < {GROUPS} then 1 else ceil((common + least(common, rare)) / ({GROUPS} - 1)) end
        as width from total
)
select step, least({GROUPS} - 2, floor(place / width + 1e-9))::bigint as bin from placed, width
union all select step, -1 from known where step < 0
"""
_LONGEST_GROUP = "select max(steps) from (select count(*) as steps from groups where bin >= 0 group by bin)"
# Selects the row with the highest peak, and among equal peaks the row of the lowest step. One number compares
# faster than several columns.
_KEY = "peak::hugeint * 9223372036854775808::hugeint - step"
_ADD_STEPS = f"""
insert into steps by name
select rank, device, bin, min(step) as from_step, max(step) as to_step, count(*) as count,
    unnest(arg_max({{'step': step, 'peak': peak, 'phase': phase, 'module': module}}, {_KEY})), source
from (
    select coalesce(rank::bigint, -1) as rank, coalesce(device::bigint, -1) as device, step::bigint as step,
        peak_allocated_bytes::bigint as peak, phase, module, source
    from {_READ} where {_IS_STEP}
) join groups using (step)
group by rank, device, bin, source
"""


@dataclass
class Loaded:
    """The result of `load`: the files that failed, and the size of the groups of steps."""

    failed: dict[Path, str] = field(default_factory=dict)
    """The files that are not digests, and the reason for each."""
    steps_per_group: int = 1
    """The maximum number of neighboring steps that are joined in the table `steps`."""


def load(database: Any, files: list[Path]) -> Loaded:
    """Creates the tables from `files`. Reads them twice, because the groups depend on all files."""
    columns = [f"{name} bigint" for name in _INTEGERS]
    columns += [f"{name} varchar" for name in _TEXTS] + [f"{name} double" for name in _FLOATS]
    for table in ("digests", "no_rows"):
        database.execute(f"create table {table} ({', '.join(columns)}, source varchar)")
    database.execute("create table known (step bigint, digests bigint)")
    database.execute(
        "create table steps (rank bigint, device bigint, bin bigint, from_step bigint, to_step bigint,"
        " count bigint, step bigint, peak bigint, phase varchar, module varchar, source varchar)"
    )
    loaded = Loaded()
    _in_batches(database, files, loaded, _insert)
    database.execute(_GROUP_STEPS)
    loaded.steps_per_group = database.execute(_LONGEST_GROUP).fetchone()[0] or 1
    accepted = [file for file in files if file not in loaded.failed]
    _in_batches(database, accepted, loaded, _insert_steps)
    # If only the rows of steps of a file are damaged, its other rows are in the table already, and are
    # removed here.
    gone = [str(file) for file in loaded.failed]
    database.execute("delete from digests where list_contains($files, source)", {"files": gone})
    return loaded


def _in_batches(
    database: Any, files: list[Path], loaded: Loaded, insert: Callable[[Any, list[Path], Loaded], None]
) -> None:
    """Calls `insert` with all `files`, and reports the files with which it fails."""
    import duckdb

    for batch in _batches(files):
        try:
            _at_once(database, batch, loaded, insert)
        except duckdb.Error:
            for file in batch:
                try:
                    _at_once(database, [file], loaded, insert)
                except duckdb.Error as error:
                    loaded.failed[file] = first_line(error)


def _batches(files: list[Path]) -> Iterator[list[Path]]:
    for start in range(0, len(files), _BATCH):
        yield files[start : start + _BATCH]


def _at_once(
    database: Any, files: list[Path], loaded: Loaded, insert: Callable[[Any, list[Path], Loaded], None]
) -> None:
    """Adds all rows of `files`, or no row if a file fails."""
    import duckdb

    database.begin()
    try:
        insert(database, files, loaded)
        database.commit()
    except duckdb.Error:
        database.rollback()
        raise


def _insert(database: Any, files: list[Path], loaded: Loaded) -> None:
    """Adds the rows of `files` that are not about steps, and counts the steps."""
    patterns = {_no_pattern(file): file for file in files}
    rows = dict(database.execute(_COUNT_ROWS, {"files": list(patterns)}).fetchall())
    for file in files:
        count = rows.get(str(file), 0)
        if count > MOST_ROWS:
            loaded.failed[file] = f"it has {count} rows; a digest has at most {MOST_ROWS}"
    patterns = {pattern: file for pattern, file in patterns.items() if file not in loaded.failed}
    if not patterns:
        return
    database.execute(_ADD_OTHERS, {"files": list(patterns)})
    # A file without a row of a process is a Parquet file of another program.
    empty = "select unnest($files) as source except select source from digests where kind = 'process'"
    sources = [str(file) for file in patterns.values()]
    others = [source for (source,) in database.execute(empty, {"files": sources}).fetchall()]
    database.execute("delete from digests where list_contains($files, source)", {"files": others})
    for source in others:
        loaded.failed[Path(source)] = "not a digest: it has no row of a process"
    accepted = [pattern for pattern, file in patterns.items() if file not in loaded.failed]
    if accepted:
        database.execute(_COUNT_STEPS, {"files": accepted})


def _insert_steps(database: Any, files: list[Path], loaded: Loaded) -> None:
    """Adds the rows of `files` that are about steps."""
    database.execute(_ADD_STEPS, {"files": [_no_pattern(file) for file in files]})


def _no_pattern(file: Path) -> str:
    """Escapes a path so that DuckDB does not treat it as a pattern."""
    return "".join(f"[{char}]" if char in "[*?" else char for char in str(file))
