"""Computes the difference of each rank from its peers, step by step, as a grid of bounded size.

A line of the grid is a device of a rank. A column is a group of neighboring steps, as in the table `steps`. A
cell is a level: the difference between the highest peak of these steps and the median of all devices' peaks,
on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# A rank differs from its peers if its peak differs from the median of all by more than this share.
LEAST_SHARE = 0.001
# The number of levels per power of ten above LEAST_SHARE. The last level begins at twice the median.
PER_DECADE = 10
LAST_LEVEL = 1 + PER_DECADE * round(math.log10(1 / LEAST_SHARE))
# The level of a cell whose devices have no row for its steps.
MISSING = -128
# The maximum number of lines. If there are more devices, several share a line.
MOST_LINES = 16_384
# The number of cells that are fetched from DuckDB at a time.
_AT_ONCE = 50_000

_COMPARE = f"""
create table medians as
    select bin, row_number() over (order by bin) - 1 as col, min(from_step) as from_step,
        max(to_step) as to_step, median(peak::double) as median
    from steps group by bin;
create view differences as
    select rank, device, col, steps.from_step, steps.to_step, count, step, phase, module,
        peak::double - median as difference, abs(difference) > {LEAST_SHARE} * abs(median) as differs,
        case when not differs then 0 when median = 0 then sign(difference) * {LAST_LEVEL}
        else sign(difference) * least({LAST_LEVEL},
            1 + floor(log10(abs(difference / median) / {LEAST_SHARE}) * {PER_DECADE})) end::tinyint as level
    from steps join medians using (bin);
create table devices as
    select rank, device, row_number() over (order by rank, device) - 1 as n
    from (select distinct rank, device from steps);
"""
_CELLS = """
select n // $devices_per_line as line, col, arg_max(level, (abs(level), level))
from differences join devices using (rank, device) where level <> 0 group by line, col
"""
# The cells without a row. Only lines that lack at least one cell are searched.
_MISSING = """
with known as (
    select distinct n // $devices_per_line as line, col
    from steps join medians using (bin) join devices using (rank, device)
), short as (
    select distinct n // $devices_per_line as line from devices except
    select line from known group by line having count(*) = (select count(*) from medians)
)
select line, col from short, medians except select line, col from known
"""


@dataclass
class Grid:
    """The grid, and the meaning of its lines and columns."""

    cells: bytearray
    """The levels, line by line, as signed bytes."""
    from_steps: list[int]
    """The first step of each column."""
    to_steps: list[int]
    """The last step of each column."""
    medians: list[int]
    """The median of the peaks of all devices in each column, in bytes."""
    devices: list[tuple[int, int, str]]
    """Each device: its rank, its ordinal and the name of its host."""
    devices_per_line: int
    """The number of devices that share a line. A cell shows the device furthest from the median."""
    steps_per_column: int
    """The maximum number of neighboring steps in a column."""

    @property
    def columns(self) -> int:
        return len(self.from_steps)

    @property
    def lines(self) -> int:
        return math.ceil(len(self.devices) / self.devices_per_line)


def compare(database: Any) -> None:
    """Creates the tables `medians` and `devices` and the view `differences` from the table `steps`."""
    database.execute(_COMPARE)


def grid(database: Any, steps_per_column: int) -> Grid:
    """Returns the grid from the tables that `compare` created."""
    medians = database.execute("select from_step, to_step, median from medians order by bin").fetchall()
    devices = database.execute(
        "select rank, device, any_value(host) from devices left join digests using (rank, device)"
        " group by rank, device, n order by n"
    ).fetchall()
    devices_per_line = max(1, math.ceil(len(devices) / MOST_LINES))
    columns = len(medians)
    cells = bytearray(math.ceil(len(devices) / devices_per_line) * columns)
    for line, column, level in _rows(database, _CELLS, devices_per_line):
        cells[line * columns + column] = level & 0xFF
    for line, column in _rows(database, _MISSING, devices_per_line):
        cells[line * columns + column] = MISSING & 0xFF
    return Grid(
        cells,
        [from_step for from_step, _, _ in medians],
        [to_step for _, to_step, _ in medians],
        [round(median) for _, _, median in medians],
        devices,
        devices_per_line,
        steps_per_column,
    )


def _rows(database: Any, query: str, devices_per_line: int) -> Iterator[tuple[int, ...]]:
    """Yields the rows of a query. They are fetched in batches, because there may be millions."""
    cursor = database.execute(query, {"devices_per_line": devices_per_line})
    while some := cursor.fetchmany(_AT_ONCE):
        yield from some


def percent(share: float) -> str:
    """Formats a share as a percentage with three significant digits."""
    return f"{share * 100:.3g} %"


# The shades of the grid as text. The first shade is for differences within LEAST_SHARE, each further shade
# for differences up to ten times as large, and the last shade for all larger differences.
SHADES = "·░▒▓█"


def _shade(level: int) -> int:
    return 0 if level == 0 else min(4, 1 + (level - 1) // PER_DECADE)


def text(grid: Grid, first: list[int], width: int, bands: int) -> list[str]:
    """Returns the grid as lines of at most `width` characters.

    First come the rows of the devices `first` (indices into `grid.devices`), then a row for each of at most
    `bands` bands of ranks."""
    count = min(bands, grid.lines)
    edges = [grid.lines * n // count for n in range(count + 1)]
    shown = list(zip(edges, edges[1:]))
    if count < grid.lines:
        shown = [(n // grid.devices_per_line, n // grid.devices_per_line + 1) for n in first] + shown
    names = [_band_name(grid, *band) for band in shown]
    label = max(map(len, names))
    columns = min(grid.columns, max(8, width - label - 2))
    # Maps a signed byte to its magnitude plus one, so that a missing cell is the lowest value.
    signed = [byte - 256 if byte > 127 else byte for byte in range(256)]
    table = bytes(0 if level == MISSING else abs(level) + 1 for level in signed)
    sizes = bytes(grid.cells).translate(table)
    lines = []
    edges = [grid.columns * n // columns for n in range(columns + 1)]
    for (start, end), name in zip(shown, names):
        rows = [sizes[line * grid.columns : (line + 1) * grid.columns] for line in range(start, end)]
        cells = [max(max(row[a:b]) for row in rows) for a, b in zip(edges, edges[1:])]
        drawn = "".join(" " if cell == 0 else SHADES[_shade(cell - 1)] for cell in cells)
        lines.append(f"{name:>{label}}  {drawn}")
    left, right = f"step {grid.from_steps[0]}", str(grid.to_steps[-1])
    lines.append(" " * (label + 2) + left + right.rjust(max(len(right) + 1, columns - len(left))))
    meanings = [f"to {percent(LEAST_SHARE * 10**decade)}" for decade in range(len(SHADES) - 1)]
    meanings = [meanings[0].replace("to", "within"), *meanings[1:], "more"]
    key = "  ".join(f"{shade} {name}" for shade, name in zip(SHADES, meanings))
    lines.append(f"  {key}"[:width])
    return lines


def _band_name(grid: Grid, first: int, end: int) -> str:
    low = grid.devices[first * grid.devices_per_line][0]
    high = grid.devices[min(end * grid.devices_per_line, len(grid.devices)) - 1][0]
    return f"rank {low}" if low == high else f"ranks {low}-{high}"
