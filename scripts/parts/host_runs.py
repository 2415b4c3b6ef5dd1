"""Programs on a simulated GPU in a control group with a limit. For scripts/host-corpus."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .built import BUILT, ROOT, clean_environment, installed

PROGRAMS = ROOT / "tests/host/programs.py"
THREADS = ROOT / "tests/host/threads.py"
LONGEST = 300  # the time limit of one run, in seconds
MIB = 1 << 20
# The environments and cards of programs that need more than torch 2.11.0 and one simulated GPU.
ENVIRONMENTS = {
    "diffusers_offload": ["programs", "base"],
    "zero_offload": ["programs", "more"],
    "vllm_offload": ["vllm"],
}
CARDS = {"gathered_checkpoint": "4xh100-80g", "vllm_offload": "l4", "gathered_on_every_rank": "4xh100-80g"}


def memtrace(*words: object) -> dict:
    done = subprocess.run([BUILT / "memtrace", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"memtrace {words}: {done.stderr}")
    return json.loads(done.stdout)


def end_all(cgroup: Path) -> None:
    """Kills the processes of a control group: the workers of a killed program continue to run."""
    for pid in (cgroup / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def group(limit: int) -> Iterator[Path | None]:
    """Creates a control group with a limit in bytes. Yields None if the group cannot be created."""
    version1 = Path("/sys/fs/cgroup/memory")
    top, name = (
        (version1, "memory.limit_in_bytes") if version1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    )
    folder = top / f"memtrace-host-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        yield None
        return
    try:
        yield folder
    finally:
        end_all(folder)
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def start(
    program: list[str], out: Path, cgroup: Path | None, file: Path = PROGRAMS, **settings: str
) -> subprocess.Popen:
    def enter() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    # `rank_grows` has two ranks, which torchrun starts.
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2] if program[0] == "rank_grows" else []
    command = [
        BUILT / "memtrace",
        "run",
        "-o",
        out,
        "--phantom",
        CARDS.get(program[0], "h100-80g"),
        "--",
        installed(*ENVIRONMENTS.get(program[0], ["torch", "2.11.0"])),
    ]
    command += launcher
    command += [file, *program]
    return subprocess.Popen(
        list(map(str, command)), preexec_fn=enter, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**clean_environment(), "MEMTRACE_HOST_TENSORS": "1", "OMP_NUM_THREADS": "2", **settings},
    )  # fmt: skip
