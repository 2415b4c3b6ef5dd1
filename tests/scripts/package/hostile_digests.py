"""`memtrace.ranks` over digests of which some are damaged or lie: each bad one is named, the others count.

hostile_digests.py FIXTURES
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import duckdb
import memtrace
from memtrace import _digests, _job_ranks

MOST = 2**63 - 1
ESCAPE = "\x1b[2J\u202eevil\n"


def rewritten(digest, to, change):
    """A copy of a digest in which SQL has changed columns."""
    duckdb.sql(f"select * replace ({change}) from read_parquet('{digest}')").write_parquet(str(to))


def answered(arguments):
    """The exit status, stdout and stderr of `python -m memtrace ranks`."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = _job_ranks.main(arguments)
    return status, out.getvalue(), errors.getvalue()


with tempfile.TemporaryDirectory() as folder:
    good, bad = Path(folder, "good"), Path(folder, "bad")
    told = memtrace.ranks(Path(sys.argv[1]) / "sharded", engine="local", keep=good)
    digests = sorted(good.iterdir())
    assert len(digests) == told["peaks"]["ranks"] > 1

    # Of no use at all: each alone ends nothing, together they are an error.
    bad.mkdir()
    content = digests[0].read_bytes()
    (bad / f"short{_digests.ENDING}").write_bytes(content[: len(content) // 2])
    (bad / f"empty{_digests.ENDING}").write_bytes(b"")
    (bad / f"text{_digests.ENDING}").write_text("no digest")
    duckdb.sql("select 1 as a").write_parquet(str(bad / f"other{_digests.ENDING}"))
    rewritten(digests[0], bad / f"texts{_digests.ENDING}", "'many' as rank")
    for file in sorted(bad.iterdir()):
        found = memtrace.ranks([good, file], engine="local")
        assert list(found["failed"]) == [str(file.resolve())], found["failed"]
        assert {**found, "failed": {}} == told, file
    status, out, errors = answered(["--engine", "local", str(bad)])
    assert (status, out) == (2, "") and "no trace could be read" in errors and "Traceback" not in errors, (
        errors
    )
    status, out, _ = answered(["--engine", "local", str(bad), str(good)])
    assert status == 1 and "not read: 5" in out, out

    # They lie: the answer has what they say, and neither overflows nor grows.
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
print("ok")
