"""Makes the digests of a job of ten thousand ranks, and compares the ranks on a page and as text.

many_ranks.py FOLDER WIDTH...

No such job ran: the digests are made up, as if it resumed at step 1,000,001. Four ranks differ from the
others: one from a step on, one in some steps only, one by more in each step, and one has six times as much
in its second half. One rank has no trace. A file has 500 ranks' digests, so that the test is short. Writes
FOLDER/ranks.html and prints the text at each WIDTH."""

import json
import sys
from pathlib import Path

import duckdb
from memtrace import _heat_map, _job_ranks, _job_ranks_text

RANKS, FIRST, STEPS, FILES = 10_000, 1_000_001, 600, 20
GIB = 1 << 30

folder, widths = Path(sys.argv[1]), [int(width) for width in sys.argv[2:]]
(folder / "digests").mkdir()
for first in range(0, RANKS, RANKS // FILES):
    file = folder / "digests" / f"{first:05}.digest.parquet"
    duckdb.sql(
        f"""
        with ranks as (
            select rank, 'node' || rank // 8 as host
            from range({first}, {first + RANKS // FILES}) every(rank) where rank <> 4321
        ), steps as (
            select rank, host, 0 as device, {FIRST} + step as step, 'backward' as phase,
                'GPT.h.' || step % 12 as module,
                10 * {GIB}::bigint + step * 1000 + hash(rank * 1000 + step) % 1000 + case
                when rank = 5 and step >= 400 then {GIB}
                when rank = 1234 then -{GIB}::bigint * step / {STEPS}
                when rank = 77 and step >= 300 then 50 * {GIB}::bigint
                when rank = 9999 and step between 100 and 110 then {GIB} // 4
                else 0 end as peak_allocated_bytes
            from ranks, range({STEPS}) every(step)
        )
        select 'process' as kind, rank, {RANKS} as world_size, host, 'made-up' as run_id, 1 as complete
        from ranks
        union all by name select 'step' as kind, steps.* from steps
        union all by name
        select 'device' as kind, rank, host, 'made-up' as run_id, device,
            arg_max(step, peak_allocated_bytes) as step, max(peak_allocated_bytes) as peak_allocated_bytes
            from steps group by rank, host, device
        """
    ).write_parquet(str(file))
reported, grid = _job_ranks.compared([folder / "digests"], "local", False, 10, None)
assert reported["peaks"]["ranks"] == RANKS - 1 and reported["missing_ranks"] == {
    "ranks": 1,
    "list": [4321],
}, reported
assert (grid.columns, grid.steps_per_column, grid.devices_per_line, grid.lines) == (300, 2, 1, RANKS - 1)
by_rank = {row["rank"]: row for row in reported["differing"]["list"]}
order = [row["rank"] for row in reported["differing"]["list"]]
assert order in ([77, 5, 1234, 9999], [77, 1234, 5, 9999]), by_rank
since = {
    rank: (row["since_step"] - FIRST, row["since_step_at_latest"] - FIRST) for rank, row in by_rank.items()
}
assert (since[5], since[77], since[9999]) == ((400, 401), (300, 301), (100, 101)), by_rank
# Steps are compared two at a time, so the 11 steps in which rank 9999 differs count as 12.
assert (by_rank[9999]["steps"], reported["differing"]["steps_compared_at_once"]) == (12, 2), reported
assert (grid.from_steps[:2], grid.to_steps[:2]) == ([FIRST, FIRST + 2], [FIRST + 1, FIRST + 3])
# In the second half of the steps rank 77 has six times the median, which is the last level.
levels = grid.cells[77 * grid.columns : 78 * grid.columns]
assert levels[149:151] == bytes([0, _heat_map.LAST_LEVEL]) == bytes([0, 31]), levels
assert abs(by_rank[5]["difference_bytes"] - GIB) < 10_000 and by_rank[1234]["difference_bytes"] < -0.99 * GIB
assert by_rank[9999]["module"].startswith("GPT.h.") and by_rank[9999]["phase"] == "backward", by_rank
for width in widths:
    text = _job_ranks_text.show(reported, grid, None, width)
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= width, text
    assert "rank 9999" in text and f"since steps {FIRST + 400}-{FIRST + 401}" in text, text
    [drawn] = [line for line in text.splitlines() if line.strip().startswith("rank 77  ")]
    half = (width - len("ranks 1666-3332  ")) // 2
    assert drawn.endswith("█" * half) and drawn.count("·") == half + width % 2, drawn
    assert str(FIRST + STEPS - 1) in text and "up to 2 steps" in text, text
    print(text)
_job_ranks.write_page(folder / "ranks.html", reported, grid)
json.dumps(reported)
