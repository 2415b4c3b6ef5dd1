"""`memtrace.ranks` over digests: one process and Ray give the same answers as the traces.

job_ranks.py FIXTURES
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import memtrace
import ray
from memtrace import _command, _digests

# A busy machine starts a cluster slowly.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "180")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "180")


def start_cluster():
    """Starts Ray, a second time if the machine was too slow for the first."""
    settings = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(**settings)
    except Exception as error:
        print(f"once more: {error}", file=sys.stderr)
        with contextlib.suppress(Exception):
            ray.shutdown()
        ray.init(**settings)


fixtures = Path(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    job = folder / "job"
    shutil.copytree(fixtures / "sharded", job)
    local = memtrace.ranks(job, engine="local", keep=folder / "kept")
    by_report, _ = _command.answer(["ranks", str(job)])
    peaks = sorted(rank["peak_allocated_bytes"] for rank in by_report["ranks"])
    assert sorted(row["peak_allocated_bytes"] for row in local["highest"]) == peaks, (local, by_report)
    assert (local["peaks"]["lowest"], local["peaks"]["highest"]) == (peaks[0], peaks[-1])
    assert local["peaks"]["ranks"] == local["processes"]["processes"] == len(peaks)
    assert local["missing_ranks"] == {"ranks": 0, "list": []} and local["failed"] == {}

    # Uses the same cluster for both calls, because a start takes seconds.
    start_cluster()
    on_ray = memtrace.ranks(str(job), engine="ray")
    assert on_ray == local, (on_ray, local)
    assert memtrace.ranks([job, job], engine="ray", every_node=True)["peaks"] == local["peaks"]
    # Compares the ranks from the kept digests alone, and then from the traces and a file that is not a trace.
    kept = sorted((folder / "kept").iterdir())
    assert len(kept) == len(peaks) and all(file.name.endswith(_digests.ENDING) for file in kept)
    again = memtrace.ranks([folder / "kept"], engine="local")
    assert again == local, (again, local)
    (folder / "bad.csv").write_text("no trace\n")
    reported = memtrace.ranks([job, folder / "bad.csv"], engine="local")
    assert (
        list(reported["failed"]) == [str((folder / "bad.csv").resolve())]
        and reported["peaks"] == local["peaks"]
    )
    # One trace has its digest beside it.
    shutil.copy(kept[0], job)
    beside = memtrace.ranks(job, engine="local")
    assert beside == local, (beside, local)
    # Another folder has a digest of the same name, and the digests are kept in the folder that is read last.
    other = folder / "other"
    other.mkdir()
    (other / kept[0].name).write_bytes(b"another process")
    contents = sorted([b"another process", *(file.read_bytes() for file in kept)])
    for _ in range(2):
        files = _digests.collect([str(other), str(folder / "kept")], folder / "kept", "local").files
        assert sorted(file.read_bytes() for file in files) == contents, list(files)
        assert sorted(files) == sorted((folder / "kept").iterdir()), list(files)
    (kept[0].with_name(kept[0].name.replace(_digests.ENDING, f"-2{_digests.ENDING}"))).unlink()
    # The trace of one rank is missing.
    kept[-1].unlink()
    gone = memtrace.ranks(folder / "kept", engine="local")["missing_ranks"]
    assert gone["ranks"] == len(gone["list"]) == 1, gone
    # The name of a folder may look like a pattern.
    shutil.copytree(folder / "kept", folder / "run[1]")
    assert (
        memtrace.ranks(folder / "run[1]", engine="local", keep=folder / "k[2]*")["peaks"]["ranks"]
        == len(kept) - 1
    )

    for paths, values, error in [
        (["/nowhere"], {}, memtrace.TraceError),
        ([folder / "*.nothing"], {}, memtrace.TraceError),
        ([job], {"engine": "spark"}, ValueError),
        ([job], {"every_node": True}, ValueError),
        ([job], {"by": "module"}, TypeError),
    ]:
        try:
            memtrace.ranks(paths, **{"engine": "local", **values})
        except error as why:
            print(json.dumps(str(why)))
        else:
            raise AssertionError((paths, values))
