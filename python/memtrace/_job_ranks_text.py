"""Writes the answer about the ranks of a job as text."""

from __future__ import annotations

from typing import Any

from . import _heat_map, _sizes
from ._text import printable

# The maximum number of lines, unless the length of the lists is given.
LINES = 40
# The maximum number of bands of ranks in the map, and of the listed devices that differ most.
BANDS = 6
FURTHEST = 5


def show(
    result: dict[str, Any],
    grid: _heat_map.Grid,
    top: int | None = None,
    width: int | None = None,
) -> str:
    """Returns the answer as text of at most `LINES` lines. With `top`, a list has up to `top` rows instead of
    its default length, and the text may be longer."""

    def length(default: int) -> int:
        return default if top is None else top

    # In the answer, `differing` has the devices that differ from the others.
    differing = result["differing"]
    lines = facts(result)
    if grid.lines:
        lines += ["", *_map(grid, differing, width or 100)]
    has_devices = result["peaks"]["devices"] > 0
    if has_devices or grid.lines:
        lines += ["", *_differing(differing, length(FURTHEST))]
    if has_devices:
        lines += ["", "highest peaks", *map(_peak, result["highest"][: length(3)])]
    if result["leaks"]:
        lines += ["", "growth by step", *map(_leak, result["leaks"][: length(2)])]
    if result["missing_ranks"]["ranks"]:
        lines.append(_missing(result["missing_ranks"], result["processes"]["world_size"], length(10)))
    failed = [f"  {printable(place)}: {printable(why)}" for place, why in result["failed"].items()]
    if failed:
        lines += [f"not read: {len(failed)}", *failed[: 2 if top is None else 10]]
    cut = len(max(lines, key=len)) if width is None else width
    return "\n".join(line if len(line) <= cut else line[: cut - 1] + "…" for line in lines)


def _map(grid: _heat_map.Grid, differing: dict[str, Any], width: int) -> list[str]:
    """Returns the map of the ranks by step, with its title."""
    index_of = {(rank, device): n for n, (rank, device, _) in enumerate(grid.devices)}
    first = [index_of[row["rank"], row["device"]] for row in differing["list"][:FURTHEST]]
    at_once = differing["steps_compared_at_once"]
    steps = f"up to {at_once} steps" if at_once > 1 else "step"
    title = f"largest difference from the median, by {steps}"
    return [title, *_heat_map.text(grid, first, width, BANDS)]


def _differing(differing: dict[str, Any], length: int) -> list[str]:
    """Returns the devices that differ most, with their title."""
    if not differing["devices"]:
        return ["no rank differs from the others"]
    at_most = "at most " if differing["steps_compared_at_once"] > 1 else ""
    least = _heat_map.percent(_heat_map.LEAST_SHARE)
    return [
        f"more than {least} from the median: {_counted(differing['devices'], 'device')}",
        *(
            f"  rank {row['rank']:>5}, device {row['device']}, since {_since(row)}: at most "
            f"{_difference(row['difference_bytes'])}, at step {row['step']} "
            f"({printable(row['module'], 'no module')}, {printable(row['phase'], 'no phase')}); "
            f"in {at_most}{_counted(row['steps'], 'step')}"
            for row in differing["list"][:length]
        ),
    ]


def _peak(row: dict[str, Any]) -> str:
    host = printable(row["host"], "no host")
    return f"  rank {row['rank']:>5}  {_size(row['peak_allocated_bytes']):>12}  {_where(row)}  {host}"


def _leak(row: dict[str, Any]) -> str:
    owner = " ".join(printable(row[key]) for key in ("module", "category", "line") if row[key])
    grown = f"{_size(row['bytes_per_step']):>12} a step on {_counted(row['ranks'], 'rank')}"
    return f"  {grown}: {owner or 'no owner'}"


def _missing(missing: dict[str, Any], world_size: int, length: int) -> str:
    named = missing["list"][:length]
    shown = ", ".join(map(str, named)) + (", ..." if missing["ranks"] > len(named) else "")
    return f"no trace of {missing['ranks']} of {world_size} ranks: {shown}"


def facts(result: dict[str, Any]) -> list[str]:
    """Returns the lines about the job as a whole."""
    peaks, processes = result["peaks"], result["processes"]
    lines = [
        f"{_counted(peaks['ranks'], 'rank')} on {_counted(peaks['hosts'], 'host')}, "
        f"{_counted(peaks['devices'], 'device')}"
    ]
    if peaks["devices"]:
        lines += [
            f"  peaks {_size(peaks['lowest'])} (rank {peaks['lowest_rank']}) to "
            f"{_size(peaks['highest'])} (rank {peaks['highest_rank']})",
            f"  median {_size(peaks['median'])}; at most {_size(peaks['highest_reserved'])} reserved, "
            f"{_size(peaks['highest_used'])} used",
        ]
    else:
        lines.append("  no trace has memory of a GPU")
    lines.append(
        f"  {_counted(processes['ooms'], 'OOM')} on {_counted(processes['ranks_with_ooms'], 'rank')}, "
        f"{_counted(processes['retries'], 'retry')}, {_counted(processes['lost_events'], 'lost event')}, "
        f"{_counted(processes['incomplete'], 'incomplete trace')}"
    )
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
