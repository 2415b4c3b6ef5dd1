"""The ranks of a job, compared by DuckDB from their digests."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import _command, _digests

# A rank whose peak in a step is further than this from the median of all ranks parts from its peers.
PARTED = 0.001

_PEAKS = """
select count(distinct run_id) as runs, count(*) as devices,
    count(distinct rank) as ranks, count(distinct host) as hosts,
    min(peak_allocated_bytes) as lowest, arg_min(rank, (peak_allocated_bytes, rank)) as lowest_rank,
    median(peak_allocated_bytes)::bigint as median,
    max(peak_allocated_bytes) as highest, arg_max(rank, (peak_allocated_bytes, -rank)) as highest_rank,
    max(peak_reserved_bytes) as highest_reserved, max(peak_used_bytes) as highest_used
from digests where kind = 'device'
"""
_HIGHEST = """
select rank, host, device, peak_allocated_bytes, peak_reserved_bytes, peak_used_bytes, capacity_bytes,
    step, phase, module, op
from digests where kind = 'device' order by peak_allocated_bytes desc, rank, device limit $top
"""
# The step with the greatest difference says where a rank parts; the first one, since when.
_PARTED = """
with usual as (
    select step, median(peak_allocated_bytes) as usual from digests where kind = 'step' group by step
), parted as (
    select rank, host, device, step, phase, module, peak_allocated_bytes - usual as difference
    from digests join usual using (step)
    where kind = 'step' and abs(peak_allocated_bytes - usual) > $parted * usual
)
select rank, any_value(host) as host, device, min(step) as since_step, count(*) as steps,
    arg_max(difference, (abs(difference), -step))::bigint as difference_bytes,
    arg_max(step, (abs(difference), -step)) as step,
    arg_max(phase, (abs(difference), -step)) as phase,
    arg_max(module, (abs(difference), -step)) as module
from parted group by rank, device order by abs(difference_bytes) desc, rank, device
"""
_PROCESSES = """
select coalesce(sum(ooms), 0)::bigint as ooms, count(*) filter (ooms > 0) as ranks_with_ooms,
    coalesce(sum(retries), 0)::bigint as retries, coalesce(sum(lost_events), 0)::bigint as lost_events,
    count(*) filter (complete = 0) as incomplete, count(*) as processes, max(world_size) as world_size
from digests where kind = 'process'
"""
_LEAKS = """
select * from (
    select module, category, line, count(distinct rank) as ranks,
        median(bytes_per_step)::bigint as bytes_per_step
    from digests where kind = 'leak' group by module, category, line
) order by bytes_per_step * ranks desc, module, category, line limit $top
"""
_MISSING = """
with known as (select max(world_size) as ranks from digests where kind = 'process')
select rank from known, range(known.ranks) as every(rank)
where rank not in (select rank from digests where kind = 'process' and rank is not null) order by rank
"""


def ranks(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    engine: str = "local",
    every_node: bool = False,
    top: int = 10,
    keep: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Compares the ranks of a job from digests of the traces at `paths`.

    `engine` makes the digests: "local" in this process, "ray" on a Ray cluster, one task a trace.
    With `every_node` each node of the cluster looks for `paths` on its own disk. `keep` is a folder
    for the digests."""
    try:
        import duckdb
    except ImportError as error:
        raise ImportError('the answer needs DuckDB: pip install "gpu-memtrace[ray]"') from error
    paths = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    with tempfile.TemporaryDirectory(prefix="memtrace-ranks-") as folder:
        collected = _digests.collect(paths, Path(keep or folder), engine, every_node)
        if not collected.files:
            whys = [f"{place}: {why}" for place, why in collected.failed.items()]
            raise _command.TraceError(f"no trace could be read; the first: {whys[0]}")
        with duckdb.connect() as database:
            return {**answer(database, collected.files, top), "failed": collected.failed}


def answer(database: Any, files: list[Path], top: int) -> dict[str, Any]:
    """The answer from digests, by a connection of DuckDB."""
    # A table, not a view: each file is opened once, and not once for each question.
    database.read_parquet([str(file) for file in files], union_by_name=True).create("digests")

    def rows(query: str, **values: Any) -> list[dict[str, Any]]:
        cursor = database.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    parted = rows(_PARTED, parted=PARTED)
    return {
        "peaks": rows(_PEAKS)[0],
        "processes": rows(_PROCESSES)[0],
        "highest": rows(_HIGHEST, top=top),
        "parted": {"devices": len(parted), "list": parted[:top]},
        "leaks": rows(_LEAKS, top=top),
        "missing_ranks": [row["rank"] for row in rows(_MISSING)],
    }


def show(told: dict[str, Any]) -> str:
    """The answer as text."""
    peaks, processes = told["peaks"], told["processes"]
    lines = []
    if peaks["runs"] > 1:
        lines += [
            f"{peaks['runs']} runs are compared as one: name the folder of one run to keep them apart",
            "",
        ]
    lines += [
        f"{peaks['ranks']} ranks on {peaks['hosts']} hosts, {peaks['devices']} devices",
        f"  peak allocated: {_size(peaks['lowest'])} (rank {peaks['lowest_rank']}), median "
        f"{_size(peaks['median'])}, {_size(peaks['highest'])} (rank {peaks['highest_rank']})",
        f"  highest reserved {_size(peaks['highest_reserved'])}, highest in use on a device "
        f"{_size(peaks['highest_used'])}",
        f"  {processes['ooms']} OOMs on {processes['ranks_with_ooms']} ranks, {processes['retries']} retries,"
        f" {processes['lost_events']} events lost, {processes['incomplete']} traces without an end",
        "",
        "highest peaks",
    ]
    for row in told["highest"]:
        lines.append(
            f"  rank {row['rank']:>5}  {_size(row['peak_allocated_bytes']):>12}  step {row['step']}, "
            f"{row['phase'] or 'no phase'}, {row['module'] or 'no module'}  {row['host']}"
        )
    parted = told["parted"]
    lines += [
        "",
        f"apart from the median of their step by more than {PARTED:.1%}: {parted['devices']} devices",
    ]
    for row in parted["list"]:
        sign = "+" if row["difference_bytes"] >= 0 else "-"
        lines.append(
            f"  rank {row['rank']:>5}  {sign}{_size(abs(row['difference_bytes']))} at step {row['step']}, "
            f"{row['phase'] or 'no phase'}, {row['module'] or 'no module'}; since step {row['since_step']}, "
            f"{row['steps']} steps"
        )
    if told["leaks"]:
        lines += ["", "growth by step"]
    for row in told["leaks"]:
        place = " ".join(filter(None, [row["module"], row["category"], row["line"]])) or "no owner"
        lines.append(f"  {_size(row['bytes_per_step']):>12} a step on {row['ranks']} ranks: {place}")
    missing = told["missing_ranks"]
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        lines += ["", f"no trace of {len(missing)} of {processes['world_size']} ranks: {shown}"]
    if told["failed"]:
        lines += ["", f"not read: {len(told['failed'])}"]
        lines += [f"  {place}: {why}" for place, why in list(told["failed"].items())[:10]]
    return "\n".join(lines)


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def main(arguments: list[str]) -> int:
    """`python -m memtrace ranks --engine ENGINE PATH...`"""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m memtrace ranks",
        description="Compare the ranks of a job from digests of their traces, made where the traces lie.",
    )
    parser.add_argument("--engine", choices=_digests.ENGINES, default="local", help="what makes the digests")
    parser.add_argument(
        "--every-node",
        action="store_true",
        help="each node of the Ray cluster looks for PATH on its own disk",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="lines of each list [default: 10]")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the digests in this folder")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="folders of runs, patterns, traces or digests"
    )
    options = parser.parse_args(arguments)
    if options.top < 0:
        parser.error("--top: expected 0 or more")
    try:
        # Ray prints to stdout when a node dies.
        with contextlib.redirect_stdout(sys.stderr):
            told = ranks(
                options.paths,
                engine=options.engine,
                every_node=options.every_node,
                top=options.top,
                keep=options.keep,
            )
    except (ImportError, ValueError, OSError, _command.TraceError) as error:
        print(f"memtrace: {error}", file=sys.stderr)
        return 2
    print(json.dumps(told, indent=2) if options.json else show(told))
    return 1 if told["failed"] else 0
