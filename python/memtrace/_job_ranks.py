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

from . import _command, _digest_table, _digests, _heat_map, _ranks_page, _sizes
from ._text import printable

# The maximum number of lines of the answer as text, unless the length of its lists is given.
LINES = 40
# The maximum number of bands of ranks in the map, and of the listed ranks that differ most.
BANDS = 6
FURTHEST = 5
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
_PARTED = """
select *, count(*) over () as devices from (
    select rank, device, min(from_step) as since_step, min(to_step) as since_step_at_latest,
        sum(count)::bigint as steps,
        try_cast(arg_max(difference, (abs(difference), -step::hugeint)) as hugeint) as difference_bytes,
        arg_max(step, (abs(difference), -step::hugeint)) as step,
        arg_max(phase, (abs(difference), -step::hugeint)) as phase,
        arg_max(module, (abs(difference), -step::hugeint)) as module,
        max(abs(difference)) as furthest
    from apart where parts group by rank, device
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
    facts = [printable(line.strip()) for line in _facts(result)]
    _ranks_page.write(path, grid, result["parted"], f"{result['peaks']['ranks']} ranks", facts)


def _short(result: dict[str, Any], top: int) -> dict[str, Any]:
    return {**result, "parted": {**result["parted"], "list": result["parted"]["list"][:top]}}


def compared(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    engine: str,
    every_node: bool,
    top: int,
    keep: str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], _heat_map.Grid]:
    """Returns the answer of `ranks` with more of the differing ranks, and the grid of all ranks by step."""
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
                result["parted"]["steps_compared_at_once"] = loaded.steps_per_group
                return result, _heat_map.grid(database, loaded.steps_per_group)
            except duckdb.Error as error:
                raise _command.TraceError(f"DuckDB cannot answer: {error}") from error


def answer(database: Any, top: int) -> dict[str, Any]:
    """Returns the answer from the tables of a DuckDB connection."""

    def rows(query: str, **values: Any) -> list[dict[str, Any]]:
        cursor = database.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    parted, missing = rows(_PARTED, most=max(top, ON_PAGE, 1)), rows(_MISSING, top=top)[0]
    devices = parted[0]["devices"] if parted else 0
    for row in parted:
        del row["furthest"], row["devices"]
    return {
        "peaks": rows(_PEAKS)[0],
        "processes": rows(_PROCESSES)[0],
        "highest": rows(_HIGHEST, top=top),
        "parted": {"devices": devices, "list": parted},
        "leaks": rows(_LEAKS, top=top),
        "missing_ranks": {"ranks": missing["ranks"], "list": missing["list"] or []},
    }


def show(
    result: dict[str, Any],
    grid: _heat_map.Grid,
    top: int | None = None,
    width: int | None = None,
    plain: bool = False,
) -> str:
    """Returns the answer as text of at most `LINES` lines. With `top`, a list has up to `top` rows instead of
    its default length, and the text may be longer."""
    parted, missing = result["parted"], result["missing_ranks"]
    short = [f"  {printable(place)}: {printable(why)}" for place, why in result["failed"].items()]
    at_once = parted["steps_compared_at_once"]
    lines = _facts(result)
    if grid.lines:
        place_of = {(rank, device): n for n, (rank, device, _) in enumerate(grid.devices)}
        first = [place_of[row["rank"], row["device"]] for row in parted["list"][:FURTHEST]]
        steps = f"up to {at_once} steps" if at_once > 1 else "step"
        title = f"largest difference from the median, by {steps}"
        lines += ["", title, *_heat_map.text(grid, first, width or 100, BANDS, plain)]
    if parted["devices"]:
        rows = parted["list"][: FURTHEST if top is None else top]
        least = _heat_map.percent(_heat_map.PARTED)
        lines += ["", f"more than {least} from the median: {_counted(parted['devices'], 'device')}"]
        lines += [
            f"  rank {row['rank']:>5}, device {row['device']}, since {_since(row)}: at most "
            f"{_difference(row['difference_bytes'])}, at step {row['step']} "
            f"({printable(row['module'], 'no module')}, {printable(row['phase'], 'no phase')}); "
            f"in {'at most ' if at_once > 1 else ''}{_counted(row['steps'], 'step')}"
            for row in rows
        ]
    else:
        lines += ["", "no rank differs from the others"]
    lines += ["", "highest peaks"]
    for row in result["highest"][: 3 if top is None else top]:
        host = printable(row["host"], "no host")
        lines.append(
            f"  rank {row['rank']:>5}  {_size(row['peak_allocated_bytes']):>12}  {_where(row)}  {host}"
        )
    if result["leaks"]:
        lines += ["", "growth by step"]
    for row in result["leaks"][: 2 if top is None else top]:
        owner = " ".join(printable(row[key]) for key in ("module", "category", "line") if row[key])
        grown = f"{_size(row['bytes_per_step']):>12} a step on {_counted(row['ranks'], 'rank')}"
        lines.append(f"  {grown}: {owner or 'no owner'}")
    if missing["ranks"]:
        named = missing["list"][: 10 if top is None else top]
        shown = ", ".join(map(str, named)) + (", ..." if missing["ranks"] > len(named) else "")
        lines.append(f"no trace of {missing['ranks']} of {result['processes']['world_size']} ranks: {shown}")
    if short:
        lines += [f"not read: {len(short)}", *short[: 2 if top is None else 10]]
    cut = len(max(lines, key=len)) if width is None else width
    return "\n".join(
        line if len(line) <= cut else line[: cut - 1] + ("~" if plain else "…") for line in lines
    )


def _facts(result: dict[str, Any]) -> list[str]:
    """Returns the lines about the job as a whole."""
    peaks, processes = result["peaks"], result["processes"]
    lines = [
        f"{_counted(peaks['ranks'], 'rank')} on {_counted(peaks['hosts'], 'host')}, "
        f"{_counted(peaks['devices'], 'device')}",
        f"  peaks {_size(peaks['lowest'])} (rank {peaks['lowest_rank']}) to "
        f"{_size(peaks['highest'])} (rank {peaks['highest_rank']})",
        f"  median {_size(peaks['median'])}; at most {_size(peaks['highest_reserved'])} reserved, "
        f"{_size(peaks['highest_used'])} used",
        f"  {_counted(processes['ooms'], 'OOM')} on {_counted(processes['ranks_with_ooms'], 'rank')}, "
        f"{_counted(processes['retries'], 'retry')}, {_counted(processes['lost_events'], 'lost event')}, "
        f"{_counted(processes['incomplete'], 'incomplete trace')}",
    ]
    if peaks["runs"] > 1:
        lines.append(f"  {peaks['runs']} runs are compared as one job; for one run alone, name its folder")
    return lines


def _counted(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _since(row: dict[str, Any]) -> str:
    first, last = row["since_step"], row["since_step_at_latest"]
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _where(row: dict[str, Any]) -> str:
    step = "no step" if row["step"] is None else f"step {row['step']}"
    return f"{step}, {printable(row['phase'], 'no phase')}, {printable(row['module'], 'no module')}"


def _difference(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{'+' if count >= 0 else '-'}{_size(abs(count))}"


def _size(count: int | None) -> str:
    return "unknown" if count is None else _sizes.show(count)


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
        "--top", type=int, metavar="N", help=f"lines per list [default: {LINES} lines in all]"
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
        print(show(result, grid, options.top, width, plain=not _has_shades(sys.stdout)))
    return 1 if result["failed"] else 0


def _has_shades(stream: Any) -> bool:
    """Returns true if the encoding of a stream has the characters of the map."""
    try:
        (_heat_map.SHADES + "…").encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
