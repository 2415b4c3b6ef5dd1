"""The digests of a job as one table of DuckDB. A digest that cannot be read is left out and named."""

from __future__ import annotations

from collections.abc import Iterator
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
_BATCH = 200


def load(database: Any, files: list[Path]) -> dict[Path, str]:
    """Makes the table `digests` from `files`: each is opened once, and not once for each question.

    Returns the files that are no digests, and why."""
    import duckdb

    columns = [f"{name} bigint" for name in _INTEGERS]
    columns += [f"{name} varchar" for name in _TEXTS] + [f"{name} double" for name in _FLOATS]
    database.execute(f"create table digests ({', '.join(columns)}, source varchar)")
    failed: dict[Path, str] = {}
    for batch in _batches(files):
        try:
            _insert(database, batch)
        except duckdb.Error:
            for file in batch:
                try:
                    _insert(database, [file])
                except duckdb.Error as error:
                    failed[file] = _why(error)
    # A Parquet file of another program.
    empty = "select unnest($files) as source except select source from digests where kind = 'process'"
    names = {str(file): file for file in files}
    for (source,) in database.execute(empty, {"files": list(names)}).fetchall():
        failed.setdefault(names[source], "no digest: it has no row of a process")
    gone = [str(file) for file in failed]
    database.execute("delete from digests where list_contains($files, source)", {"files": gone})
    # Without a rank a digest says -1.
    database.execute("update digests set rank = -1 where rank is null")
    return failed


def _batches(files: list[Path]) -> Iterator[list[Path]]:
    for start in range(0, len(files), _BATCH):
        yield files[start : start + _BATCH]


def _insert(database: Any, files: list[Path]) -> None:
    names = "|".join(_INTEGERS + _TEXTS + _FLOATS)
    database.execute(
        f"insert into digests by name select columns('^({names})$'), filename as source "
        "from read_parquet($files, union_by_name = true, filename = true)",
        {"files": [_no_pattern(file) for file in files]},
    )


def _no_pattern(file: Path) -> str:
    """A path that DuckDB takes for no pattern."""
    return "".join(f"[{char}]" if char in "[*?" else char for char in str(file))


def _why(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
