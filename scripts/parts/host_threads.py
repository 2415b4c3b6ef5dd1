"""Programs of tests/host/threads.py in too small a control group, as they are and remedied. For
scripts/host-corpus."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .host_runs import LONGEST, MIB, THREADS, end_all, group, memtrace, start

NO_LIMIT = 12_000  # MiB
MOST_ROWS = 4  # of a ledger


@dataclass(frozen=True)
class Thread:
    """A program of tests/host/threads.py: too large for its control group, but not with its remedy."""

    name: str
    source: str  # the thread that it rebuilds, or what it does
    limit: int  # the limit of the control group in MiB; 0 for no limit, and `ledger --host` in place of `oom`
    says: tuple[str, ...]  # what the answer must contain
    remedy: str  # what `--remedied` changes


THREAD_CASES = [
    Thread("native_leak", "vllm#50150", 1200, ("try: heap",), "the block is freed"),
    Thread("zero_offload", "LlamaFactory#6755", 1500, ("try: CPU tensors",), "low-rank adapters"),
    Thread("offloaded_models", "ComfyUI#9456", 1200, ("offloaded with .cpu()",), "a model is deleted"),
    Thread("gathered_on_every_rank", "pytorch#118520", 2700, ("rank0_only",), "`rank0_only=True`"),
    Thread("copied_by_workers", "pytorch#122935", 1300, ("arrays instead of Python objects",), "an array"),
    Thread("pinned_twice", "pytorch#95823", 0, ("pinned: rounding",), "one buffer, sliced"),
    Thread("numpy_cache", "a cache of decoded images", 1200, ("NumPy",), "`uint8`, not `float64`"),
    Thread("tokens_in_memory", "tokens as lists", 1000, ("try: anonymous",), "arrays of `int32`"),
    Thread("offloaded_twice", "cpu_offload with a copied state", 1150, ("try: CPU tensors",), "no copy"),
    Thread("saves_in_thread", "saves in a thread", 1000, ("copies of a state",), "one save at a time"),
    Thread("pandas_workers", "a table of strings", 2000, ("arrays instead of Python objects",), "bytes"),
]


def in_use(cgroup: Path) -> int:
    """Returns the bytes of a control group that the kernel cannot reclaim: without the cache of files."""
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    keys = ("total_rss", "total_shmem") if "total_rss" in stat else ("anon", "shmem")
    return sum(int(stat[key]) for key in keys)


def limited(name: str, limit: int, out: Path, *options: str) -> tuple[int, int] | None:
    """Runs a program in a control group with a limit in MiB. Returns its exit status and its highest use in
    bytes, or `None` if no group can be created."""
    with group(limit * MIB) as cgroup:
        if cgroup is None:
            return None
        process, most = start([name, *options], out, cgroup, THREADS), 0
        end = time.monotonic() + LONGEST
        while process.poll() is None and time.monotonic() < end:
            most = max(most, in_use(cgroup))
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
        process.wait()
        # A worker that continued to run would keep the pipes open.
        end_all(cgroup)
        process.communicate()
        return process.returncode, most


def thread(case: Thread) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        out, remedied = Path(folder) / "out", Path(folder) / "remedied"
        limit = case.limit or NO_LIMIT
        first = limited(case.name, limit, out)
        if first is None:
            return (
                f"| {case.name} | {case.source} | left out: no control group can be made here | | | | |",
                True,
            )
        if case.limit:
            answers = memtrace("oom", "--json", out)["killed"]
            sentences = max((one["sentences"] for one in answers), key=len, default=["no verdict"])
            is_right = any(sentence.startswith("try: ") for sentence in sentences)
            before = f"killed at {case.limit:,}"
        else:
            rows = memtrace("ledger", "--host", "--json", out)["host"][0]["rows"][:MOST_ROWS]
            sentences = [
                f"{row['pss_bytes'] / MIB:,.0f} MiB {row['held_by']}: {row['advice']}" for row in rows
            ]
            is_right, before = first[0] == 0, f"{first[1] / MIB:,.0f}"
        # Of a killed program, only the advice counts: the verdict names what held most in any case.
        advice = [text for text in sentences if text.startswith("try: ")] if case.limit else sentences
        is_right = is_right and all(text in " ".join(advice) for text in case.says)
        status, most = limited(case.name, limit, remedied, "--remedied") or (1, 0)
        with_remedy = f"{most / MIB:,.0f}" if status == 0 else f"status {status}"
        figures = f"{before} | {'right' if is_right else 'WRONG'} | {' '.join(sentences)}"
        row = f"| {case.name} | {case.source} | {figures} | {case.remedy} | {with_remedy} |"
        return row, is_right and status == 0
