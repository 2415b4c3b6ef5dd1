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

from . import _command, _digest_table, _digests
from ._text import printable

# A rank whose peak in a step is further than this from the median of all ranks parts from its peers.
PARTED = 0.001

# A digest may have any numbers: sums, medians and differences are of wider types than its columns.
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
# The step with the greatest difference says where a rank parts; the first one, since when.
_PARTED = """
with usual as (
    select step, median(peak_allocated_bytes::double) as usual from digests where kind = 'step' group by step
), parted as (
    select rank, host, device, step, phase, module, peak_allocated_bytes::double - usual as difference
    from digests join usual using (step)
    where kind = 'step' and abs(peak_allocated_bytes::double - usual) > $parted * abs(usual)
)
select rank, any_value(host) as host, device, min(step) as since_step, count(*) as steps,
    try_cast(arg_max(difference, (abs(difference), -step::hugeint)) as hugeint) as difference_bytes,
    arg_max(step, (abs(difference), -step::hugeint)) as step,
    arg_max(phase, (abs(difference), -step::hugeint)) as phase,
    arg_max(module, (abs(difference), -step::hugeint)) as module
from parted group by rank, device order by max(abs(difference)) desc, rank, device
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
# A digest may say any world size. The first ranks without one lie among as many ranks more than there are.
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
) -> dict[str, Any]:
    """Compares the ranks of a job from digests of the traces at `paths`. `failed` names what cannot be read.

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
        with duckdb.connect() as database:
            unread = _digest_table.load(database, list(collected.files))
            failed = {**collected.failed, **{collected.files[file]: why for file, why in unread.items()}}
            if len(unread) == len(collected.files):
                whys = [f"{printable(place)}: {printable(why)}" for place, why in failed.items()]
                raise _command.TraceError(f"no trace could be read; the first: {whys[0]}")
            try:
                return {**answer(database, top), "failed": failed}
            except duckdb.Error as error:
                raise _command.TraceError(f"DuckDB cannot answer: {error}") from error


def answer(database: Any, top: int) -> dict[str, Any]:
    """The answer from the table `digests` of a connection of DuckDB."""

    def rows(query: str, **values: Any) -> list[dict[str, Any]]:
        cursor = database.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    parted, missing = rows(_PARTED, parted=PARTED), rows(_MISSING, top=top)[0]
    return {
        "peaks": rows(_PEAKS)[0],
        "processes": rows(_PROCESSES)[0],
        "highest": rows(_HIGHEST, top=top),
        "parted": {"devices": len(parted), "list": parted[:top]},
        "leaks": rows(_LEAKS, top=top),
        "missing_ranks": {"ranks": missing["ranks"], "list": missing["list"] or []},
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
        host = printable(row["host"], "no host")
        lines.append(
            f"  rank {row['rank']:>5}  {_size(row['peak_allocated_bytes']):>12}  {_where(row)}  {host}"
        )
    parted = told["parted"]
    lines += [
        "",
        f"apart from the median of their step by more than {PARTED:.1%}: {parted['devices']} devices",
    ]
    for row in parted["list"]:
        lines.append(
            f"  rank {row['rank']:>5}  {_difference(row['difference_bytes'])} at {_where(row)}; "
            f"since step {row['since_step']}, {row['steps']} steps"
        )
    if told["leaks"]:
        lines += ["", "growth by step"]
    for row in told["leaks"]:
        owner = " ".join(printable(row[key]) for key in ("module", "category", "line") if row[key])
        lines.append(
            f"  {_size(row['bytes_per_step']):>12} a step on {row['ranks']} ranks: {owner or 'no owner'}"
        )
    missing = told["missing_ranks"]
    if missing["ranks"]:
        shown = ", ".join(map(str, missing["list"])) + (
            ", ..." if missing["ranks"] > len(missing["list"]) else ""
        )
        lines += ["", f"no trace of {missing['ranks']} of {processes['world_size']} ranks: {shown}"]
    if told["failed"]:
        lines += ["", f"not read: {len(told['failed'])}"]
        failed = list(told["failed"].items())[:10]
        lines += [f"  {printable(place)}: {printable(why)}" for place, why in failed]
    return "\n".join(lines)


def _where(row: dict[str, Any]) -> str:
    step = "no step" if row["step"] is None else f"step {row['step']}"
    return f"{step}, {printable(row['phase'], 'no phase')}, {printable(row['module'], 'no module')}"


def _difference(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{'+' if count >= 0 else '-'}{_size(abs(count))}"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    if count < 0:
        return f"-{_size(-count)}"
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
        print(f"memtrace: {printable(error, longest=4096)}", file=sys.stderr)
        return 2
    print(json.dumps(told, indent=2) if options.json else show(told))
    return 1 if told["failed"] else 0
