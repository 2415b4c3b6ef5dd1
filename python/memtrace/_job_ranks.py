"""Compares the ranks of a job with DuckDB, from their digests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import _command, _digest_table, _digests, _heat_map, _job_ranks_text, _ranks_page
from ._text import printable

# The maximum number of differing devices that the page describes.
ON_PAGE = 500

# A digest may have any numbers, so sums, medians and differences use wider types than its columns.
_PEAKS = """
select count(distinct run_id) as runs, count(*) as devices,
    count(distinct rank) as ranks, count(distinct host) as hosts,
    min(peak_allocated_bytes) as lowest, arg_min(rank, (peak_allocated_bytes, rank)) as lowest_rank,
    try_cast(median(peak_allocated_bytes::double) as hugeint) as median,
    max(peak_allocated_bytes) as highest,
    arg_max(rank, (peak_allocated_bytes, -rank::hugeint)) as highest_rank,
    max(peak_reserved_bytes) as highest_reserved, max(peak_used_bytes) as highest_used
from digests where kind = 'device'
"""
_HIGHEST = """
select rank, host, device, peak_allocated_bytes, peak_reserved_bytes, peak_used_bytes, capacity_bytes,
    step, phase, module, op
from digests where kind = 'device' order by peak_allocated_bytes desc nulls last, rank, device limit $top
"""
# The step with the largest difference shows where a rank differs; the first group of steps shows since when.
_DIFFERING = """
select *, count(*) over () as devices from (
    select rank, device, min(from_step) as since_step, min(to_step) as since_step_at_latest,
        sum(count)::bigint as steps,
        try_cast(arg_max(difference, (abs(difference), -step::hugeint)) as hugeint) as difference_bytes,
        arg_max(step, (abs(difference), -step::hugeint)) as step,
        arg_max(phase, (abs(difference), -step::hugeint)) as phase,
        arg_max(module, (abs(difference), -step::hugeint)) as module,
        max(abs(difference)) as furthest
    from differences where differs group by rank, device
) left join (select rank, any_value(host) as host from digests group by rank) using (rank)
order by furthest desc, rank, device limit $most
"""
_PROCESSES = """
select coalesce(sum(ooms), 0) as ooms, count(*) filter (ooms > 0) as ranks_with_ooms,
    coalesce(sum(retries), 0) as retries, coalesce(sum(lost_events), 0) as lost_events,
    count(*) filter (complete = 0) as incomplete, count(*) as processes, max(world_size) as world_size
from digests where kind = 'process'
"""
_LEAKS = """
select * from (
    select module, category, line, count(distinct rank) as ranks,
        try_cast(median(bytes_per_step) as hugeint) as bytes_per_step
    from digests where kind = 'leak' group by module, category, line
) order by bytes_per_step::double * ranks desc nulls last, module, category, line limit $top
"""
# A digest may have any world size. To find the first $top missing ranks, it is enough to search $top more
# ranks than there are digests.
_MISSING = """
with known as (
    select max(world_size) as ranks from digests where kind = 'process'
), there as (
    select distinct rank from digests, known where kind = 'process' and rank >= 0 and rank < known.ranks
), missing as (
    select unnest(range(least((select ranks from known), (select count(*) from there) + $top))) as rank
    except select rank from there
)
select (select coalesce(max(ranks), 0) from known) - (select count(*) from there) as ranks,
    list(rank order by rank)[:$top] as list from missing
"""


def ranks(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    engine: str = "local",
    every_node: bool = False,
    top: int = 10,
    keep: str | os.PathLike[str] | None = None,
    page: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Compares the ranks of a job from digests of the traces at `paths`. `failed` lists the unreadable
    traces.

    `engine` makes the digests: "local" in this process, or "ray" on a Ray cluster with one task per trace.
    With `every_node`, each node of the cluster searches for `paths` on its own disk. `keep` is a folder in
    which the digests are kept, without changing a file there; `page` is the file for an HTML page of all
    ranks by step."""
    result, grid = compared(paths, engine, every_node, top, keep)
    if page is not None:
        write_page(Path(page), result, grid)
    return _short(result, top)


def write_page(path: Path, result: dict[str, Any], grid: _heat_map.Grid) -> None:
    """Writes the page of an answer of `compared`."""
    facts = [printable(line.strip()) for line in _job_ranks_text.facts(result)]
    _ranks_page.write(path, grid, result["differing"], f"{result['peaks']['ranks']} ranks", facts)


def _short(result: dict[str, Any], top: int) -> dict[str, Any]:
    return {**result, "differing": {**result["differing"], "list": result["differing"]["list"][:top]}}


def compared(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    engine: str,
    every_node: bool,
    top: int,
    keep: str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], _heat_map.Grid]:
    """Returns the answer of `ranks` with more of the differing ranks, and the grid of all ranks by step."""
    if top < 0:
        raise ValueError(f"top must be 0 or more, not {top}")
    try:
        import duckdb
    except ImportError as error:
        raise ImportError('the answer needs DuckDB: pip install "gpu-memtrace[ray]"') from error
    paths = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    with tempfile.TemporaryDirectory(prefix="memtrace-ranks-") as folder:
        collected = _digests.collect(paths, Path(keep or folder), engine, every_node)
        with duckdb.connect(config=_digest_table.SETTINGS) as database:
            loaded = _digest_table.load(database, list(collected.files))
            unread = {collected.files[file]: why for file, why in loaded.failed.items()}
            failed = {**collected.failed, **unread}
            if len(loaded.failed) == len(collected.files):
                whys = [f"{printable(place)}: {printable(why)}" for place, why in failed.items()]
                raise _command.TraceError(f"no trace could be read; the first: {whys[0]}")
            try:
                _heat_map.compare(database)
                result = {**answer(database, top), "failed": failed}
                result["differing"]["steps_compared_at_once"] = loaded.steps_per_group
                return result, _heat_map.grid(database, loaded.steps_per_group)
            except duckdb.Error as error:
                raise _command.TraceError(f"DuckDB cannot answer: {error}") from error


def answer(database: Any, top: int) -> dict[str, Any]:
    """Returns the answer from the tables of a DuckDB connection."""

    def rows(query: str, **values: Any) -> list[dict[str, Any]]:
        cursor = database.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row)) for row in cursor.fetchall()]

    differing, missing = rows(_DIFFERING, most=max(top, ON_PAGE, 1)), rows(_MISSING, top=top)[0]
    devices = differing[0]["devices"] if differing else 0
    for row in differing:
        del row["furthest"], row["devices"]
    return {
        "peaks": rows(_PEAKS)[0],
        "processes": rows(_PROCESSES)[0],
        "highest": rows(_HIGHEST, top=top),
        "differing": {"devices": devices, "list": differing},
        "leaks": rows(_LEAKS, top=top),
        "missing_ranks": {"ranks": missing["ranks"], "list": missing["list"] or []},
    }


def main(arguments: list[str]) -> int:
    """Runs `python -m memtrace ranks --engine ENGINE PATH...`. Returns the exit status."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m memtrace ranks",
        description="Compare the ranks of a job from digests, made where the traces are.",
    )
    parser.add_argument(
        "--engine", choices=_digests.ENGINES, default="local", help="the engine that makes the digests"
    )
    parser.add_argument(
        "--every-node",
        action="store_true",
        help="read PATH on the disk of each node of the Ray cluster",
    )
    parser.add_argument(
        "--top", type=int, metavar="N", help=f"lines per list [default: {_job_ranks_text.LINES} lines in all]"
    )
    parser.add_argument(
        "--page", metavar="FILE", help="write a page of all ranks by step, to zoom in a browser"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep the digests in this folder")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="folders of runs, patterns, traces or digests"
    )
    options = parser.parse_args(arguments)
    if options.top is not None and options.top < 0:
        parser.error("--top: expected 0 or more")
    try:
        # Ray prints to stdout when a node dies, but stdout is only for the answer.
        with contextlib.redirect_stdout(sys.stderr):
            top = 10 if options.top is None else options.top
            result, grid = compared(options.paths, options.engine, options.every_node, top, options.keep)
            if options.page:
                write_page(Path(options.page), result, grid)
    except (ImportError, ValueError, OSError, _command.TraceError) as error:
        print(f"memtrace: {printable(error, longest=4096)}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_short(result, top), indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(_job_ranks_text.show(result, grid, options.top, width))
    return 1 if result["failed"] else 0
