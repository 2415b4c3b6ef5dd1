"""The digests of a job as tables of DuckDB. A digest that cannot be read is left out and named.

`digests` has every row but those of steps. `steps` has those, with neighbouring steps as one when there are
many: ten thousand ranks of ten thousand steps would be a hundred million rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The columns that the answers need. An older digest lacks some: they are null then.
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
# The files of one statement. A damaged one costs that its neighbours are read again.
_BATCH = 50
# The most groups of neighbouring steps: more than a screen has columns.
GROUPS = 512

# The steps before the first one are a group of their own.
_GROUP = "case when step < 0 then -1 else step // $width end"
# The row with the highest peak, of several the one of the lowest step: as one number, which compares faster
# than several columns.
_KEY = "peak_allocated_bytes::hugeint * 9223372036854775808::hugeint - step"
_ADD_STEPS = f"""
insert into steps select rank, device, {_GROUP} as bin, min(step), count(*),
    unnest(arg_max({{'step': step, 'peak': peak_allocated_bytes, 'phase': phase, 'module': module}},
        {_KEY})), source
from batch where kind = 'step' and step is not null and peak_allocated_bytes is not null
group by rank, device, bin, source
"""
_JOIN_STEPS = f"""
create or replace table steps as
select rank, device, bin, from_step, count, top.step, top.peak as peak, top.phase, top.module, source from (
    select rank, device, {_GROUP.replace("step", "from_step")} as bin, min(from_step) as from_step,
        sum(count)::bigint as count, source,
        arg_max({{'step': step, 'peak': peak, 'phase': phase, 'module': module}},
            {_KEY.replace("peak_allocated_bytes", "peak")}) as top
    from steps group by rank, device, 3, source
)
"""


@dataclass
class Loaded:
    """The digests that were read."""

    failed: dict[Path, str] = field(default_factory=dict)
    """The files that are no digests, and why."""
    steps_per_group: int = 1
    """The neighbouring steps that are one in the table `steps`."""


def load(database: Any, files: list[Path]) -> Loaded:
    """Makes the tables from `files`: each is opened once, and not once for each question."""
    import duckdb

    columns = [f"{name} bigint" for name in _INTEGERS]
    columns += [f"{name} varchar" for name in _TEXTS] + [f"{name} double" for name in _FLOATS]
    for table in ("digests", "batch"):
        database.execute(f"create table {table} ({', '.join(columns)}, source varchar)")
    database.execute(
        "create table steps (rank bigint, device bigint, bin bigint, from_step bigint, count bigint,"
        " step bigint, peak bigint, phase varchar, module varchar, source varchar)"
    )
    loaded = Loaded()
    for batch in _batches(files):
        try:
            _insert(database, batch, loaded)
        except duckdb.Error:
            for file in batch:
                try:
                    _insert(database, [file], loaded)
                except duckdb.Error as error:
                    loaded.failed[file] = _why(error)
    # A Parquet file of another program.
    empty = "select unnest($files) as source except select source from digests where kind = 'process'"
    for (source,) in database.execute(empty, {"files": [str(file) for file in files]}).fetchall():
        loaded.failed.setdefault(Path(source), "no digest: it has no row of a process")
    gone = [str(file) for file in loaded.failed]
    for table in ("digests", "steps"):
        database.execute(f"delete from {table} where list_contains($files, source)", {"files": gone})
    database.execute("drop table batch")
    return loaded


def _batches(files: list[Path]) -> Iterator[list[Path]]:
    for start in range(0, len(files), _BATCH):
        yield files[start : start + _BATCH]


def _insert(database: Any, files: list[Path], loaded: Loaded) -> None:
    """Adds all rows of `files`, or none of them."""
    import duckdb

    names = "|".join(_INTEGERS + _TEXTS + _FLOATS)
    width = loaded.steps_per_group
    database.begin()
    try:
        database.execute("delete from batch")
        database.execute(
            f"insert into batch by name select columns('^({names})$'), filename as source "
            "from read_parquet($files, union_by_name = true, filename = true)",
            {"files": [_no_pattern(file) for file in files]},
        )
        # Without a rank a digest says -1.
        database.execute("update batch set rank = -1 where rank is null")
        database.execute("insert into digests select * from batch where kind is distinct from 'step'")
        last = database.execute("select max(step) from batch where kind = 'step'").fetchone()[0] or 0
        while last // width >= GROUPS:
            width *= 2
        if width > loaded.steps_per_group:
            database.execute(_JOIN_STEPS, {"width": width})
        database.execute(_ADD_STEPS, {"width": width})
        database.commit()
    except duckdb.Error:
        database.rollback()
        raise
    loaded.steps_per_group = width


def _no_pattern(file: Path) -> str:
    """A path that DuckDB takes for no pattern."""
    return "".join(f"[{char}]" if char in "[*?" else char for char in str(file))


def _why(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
