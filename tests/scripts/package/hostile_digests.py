"""`memtrace.ranks` over digests, some damaged or with false figures: bad ones are named, the others count.

hostile_digests.py FIXTURES
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import memtrace
from memtrace import _digest_table, _digests, _job_ranks, _job_ranks_text

MOST = 2**63 - 1
ESCAPE = "\x1b[2J\u202eevil\n"


def rewritten(digest, to, change):
    """Writes a copy of a digest in which SQL has changed columns."""
    duckdb.sql(f"select * replace ({change}) from read_parquet('{digest}')").write_parquet(str(to))


def answered(arguments):
    """Returns the exit status, stdout and stderr of `python -m memtrace ranks`."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = _job_ranks.main(arguments)
    return status, out.getvalue(), errors.getvalue()


with tempfile.TemporaryDirectory() as folder:
    good, bad = Path(folder, "good"), Path(folder, "bad")
    reported = memtrace.ranks(Path(sys.argv[1]) / "sharded", engine="local", keep=good)
    digests = sorted(good.iterdir())
    assert len(digests) == reported["peaks"]["ranks"] > 1

    # Writes useless digests. Next to good ones, each must only be named; without good ones, they must be an
    # error.
    bad.mkdir()
    content = digests[0].read_bytes()
    (bad / f"short{_digests.ENDING}").write_bytes(content[: len(content) // 2])
    (bad / f"empty{_digests.ENDING}").write_bytes(b"")
    (bad / f"text{_digests.ENDING}").write_text("no digest")
    duckdb.sql("select 1 as a").write_parquet(str(bad / f"other{_digests.ENDING}"))
    rewritten(digests[0], bad / f"texts{_digests.ENDING}", "'many' as rank")
    # In this digest, only the rows of steps have a text where a number is expected.
    several = "case when kind = 'step' then 'many' end as peak_allocated_bytes"
    rewritten(digests[0], bad / f"peaks{_digests.ENDING}", several)
    duckdb.sql(f"select *, 'a' as filename from '{digests[0]}'").write_parquet(
        str(bad / f"filename{_digests.ENDING}")
    )
    # A row of a distant step, in a file without a row of the process: it must not widen the groups of steps
    # of the others.
    duckdb.sql(
        f"select 'step' as kind, {2**62} as step, 0 as rank, 0 as device, 1 as peak_allocated_bytes"
    ).write_parquet(str(bad / f"far{_digests.ENDING}"))
    # A digest with too many rows, although the file takes only 20 kB.
    many = f"from '{digests[0]}' union all by name select 'step' as kind, 0 as rank, 0 as device, 1 as step, "
    many += f"1 as peak_allocated_bytes from range({_digest_table.MOST_ROWS})"
    duckdb.sql(many).write_parquet(str(bad / f"many{_digests.ENDING}"))
    for file in sorted(bad.iterdir()):
        found = memtrace.ranks([good, file], engine="local")
        assert list(found["failed"]) == [str(file.resolve())], (file, found["failed"])
        assert {**found, "failed": {}} == reported, file
    status, out, errors = answered(["--engine", "local", str(bad)])
    assert (status, out) == (2, "") and "no trace could be read" in errors and "Traceback" not in errors, (
        errors
    )
    status, out, _ = answered(["--engine", "local", str(bad), str(good)])
    assert status == 1 and "not read: 9" in out, out

    # Digests with false figures: the answer must repeat the figures, and must neither overflow nor grow.
    lies = {
        "large": f"{MOST}::bigint as peak_allocated_bytes, {MOST}::bigint as world_size, "
        f"{MOST}::bigint as ooms",
        "small": f"({-MOST} - 1)::bigint as peak_allocated_bytes, ({-MOST} - 1)::bigint as step, "
        f"({-MOST} - 1)::bigint as rank",
        "null": "null::bigint as rank, null::bigint as step, null::varchar as host, null::varchar as module, "
        "null::bigint as peak_allocated_bytes, null::bigint as world_size",
        "odd": "'nan'::double as bytes_per_step",
        "loud": ", ".join(f"$e${ESCAPE}$e$ as {column}" for column in ("host", "module", "phase")),
    }
    for name, change in lies.items():
        lying = Path(folder, name)
        lying.mkdir()
        for number in range(3):
            rewritten(digests[number % len(digests)], lying / f"{number}{_digests.ENDING}", change)
        for paths in [[str(lying)], [str(lying), str(good)]]:
            status, out, errors = answered(["--engine", "local", *paths])
            assert (status, errors) == (0, ""), (name, errors)
            assert all(char.isprintable() or char == "\n" for char in out), (name, out)
            status, out, errors = answered(["--engine", "local", "--json", *paths])
            found = json.loads(out, parse_constant=lambda value: 1 / 0)
            assert status == 0 and len(found["missing_ranks"]["list"]) <= 10, name
            if name == "large":
                assert found["missing_ranks"]["ranks"] > MOST - 100, found["missing_ranks"]

    # The text is UTF-8 whatever the locale, as the command's.
    foreign = Path(folder, "foreign")
    foreign.mkdir()
    rewritten(digests[0], foreign / f"0{_digests.ENDING}", "'hôte' as host")
    command = [sys.executable, "-m", "memtrace", "ranks", "--engine", "local", str(foreign)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and "hôte" in done.stdout.decode(), done

    # The name of a folder, such as `rank=7`, must not add a column.
    for name in ("rank=7", "step=7", "device=7", "source=7"):
        assert memtrace.ranks(good, engine="local", keep=Path(folder, name)) == reported, name

    # Rows of steps without a device must count as a separate device, and must not change the median.
    lost = Path(folder, f"lost{_digests.ENDING}")
    rewritten(
        digests[0],
        lost,
        "null::bigint as device, 7 as rank, peak_allocated_bytes * 3 as peak_allocated_bytes",
    )
    _, grid = _job_ranks.compared([good, lost], "local", False, 10, None)
    [line] = [n for n, (rank, device, _) in enumerate(grid.devices) if (rank, device) == (7, -1)]
    levels = grid.cells[line * grid.columns : (line + 1) * grid.columns]
    assert len(grid.devices) == len(digests) + 1 and 31 in levels and 0 not in levels, levels

    # A job without a GPU has no peak and no rank that differs.
    without = Path(folder, f"without{_digests.ENDING}")
    duckdb.sql("select 'process' as kind, 0 as rank, 2 as world_size").write_parquet(str(without))
    status, out, _ = answered([str(without), "--page", str(Path(folder, "without.html"))])
    assert status == 0 and "no trace has memory of a GPU" in out and "None" not in out, out
    assert "peaks" not in out and "differs" not in out, out

    # Three ranks with 600 steps, and a fourth with 900,000 others: the rare steps must take at most half of
    # the groups.
    long = Path(folder, "long")
    long.mkdir()
    for rank in range(4):
        steps = "range(600)" if rank < 3 else "range(1000000000, 1000900000)"
        duckdb.sql(
            f"""
            select 'process' as kind, {rank} as rank, null::bigint as device, null::bigint as step,
                null::bigint as peak_allocated_bytes
            union all select 'device', {rank}, 0, 0, 1000
            union all select 'step', {rank}, 0, step, 1000 + 500 * (step = 5 and {rank} = 1)::bigint
            from {steps} every(step)
            """
        ).write_parquet(str(long / f"{rank}{_digests.ENDING}"))
    found, grid = _job_ranks.compared([long], "local", False, 10, None)
    text = _job_ranks_text.show(found, grid)
    assert "more than 0.1 % from the median: 1 device\n" in text, found["differing"]
    [row] = found["differing"]["list"]
    assert (row["rank"], row["since_step"], row["since_step_at_latest"]) == (1, 3, 5), found["differing"]
    assert grid.columns <= _digest_table.GROUPS and grid.to_steps[-1] == 1_000_899_999, grid.to_steps
    assert found["differing"]["steps_compared_at_once"] > 1000, found["differing"]

    # With too little memory for DuckDB, the error must say so, and no file may be left in the user's folder.
    empty = Path(folder, "empty")
    empty.mkdir()
    os.chdir(empty)
    _digest_table.SETTINGS["memory_limit"] = "8MB"
    status, out, errors = answered(["--engine", "local", str(long)])
    os.chdir("/")
    assert status == 2 and "Traceback" not in errors and "emory" in errors and not list(empty.iterdir()), (
        errors
    )
print("ok")
