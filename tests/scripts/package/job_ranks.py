"""`memtrace.ranks` over digests: the answers of one process and of Ray are those of the traces.

job_ranks.py FIXTURES
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import memtrace
import ray
from memtrace import _command, _digests

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
    assert local["missing_ranks"] == [] and local["failed"] == {}

    # One cluster for both calls: it takes seconds to start.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    on_ray = memtrace.ranks(str(job), engine="ray")
    assert on_ray == local, (on_ray, local)
    assert memtrace.ranks([job, job], engine="ray", every_node=True)["peaks"] == local["peaks"]
    # The digests alone, and what is no trace beside them.
    kept = sorted((folder / "kept").iterdir())
    assert len(kept) == len(peaks) and all(file.name.endswith(_digests.ENDING) for file in kept)
    again = memtrace.ranks([folder / "kept"], engine="local")
    assert again == local, (again, local)
    (folder / "bad.csv").write_text("no trace\n")
    told = memtrace.ranks([job, folder / "bad.csv"], engine="local")
    assert list(told["failed"]) == [str((folder / "bad.csv").resolve())] and told["peaks"] == local["peaks"]
    # A rank whose trace is missing.
    kept[-1].unlink()
    assert len(memtrace.ranks(folder / "kept", engine="local")["missing_ranks"]) == 1

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
