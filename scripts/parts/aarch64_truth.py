"""Traces programs with PyTorch on the simulated GPU under qemu, and compares the traces.

    aarch64_truth.py PYTHON PYTHON_OF_QEMU [CASE...]

With torch: `tests/scripts/checkers/verify.py` compares each trace with `torch.cuda.memory_stats()` at the checkpoints
of the program. With x86-64: the same program runs on this machine, and each allocation must have the same owner there.
`scripts/aarch64 truth` calls this. PYTHON is an interpreter of this machine with the same version of PyTorch, and
PYTHON_OF_QEMU that of the root folder. Exits with status 1 if a case differs.
"""

from __future__ import annotations

import collections
import csv
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "target/aarch64-truth"
BUILT = ROOT / "target/release"
# The tree and the built libraries in the root folder of qemu.
QEMU_TREE = Path("/src")
QEMU_BUILT = Path("/target/aarch64-unknown-linux-gnu/release")
OWNER = ("device", "delta_bytes", "requested_bytes", "op", "module", "phase", "step", "category")
MOST_SHOWN = 5


@dataclass
class Case:
    """A program of `tests/scripts`."""

    name: str
    script: str
    arguments: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    # Threads and processes that a test kills allocate at other moments on each machine.
    same_owners: bool = True
    # The program records torch's figures at checkpoints.
    has_checkpoints: bool = True


def conf(text):
    return {"PYTORCH_CUDA_ALLOC_CONF": text}


CASES = [
    Case("gpt", "truth/gpt.py"),
    Case("conv", "truth/conv.py"),
    Case("odd", "truth/odd.py", same_owners=False),
    Case("streams", "truth/streams.py"),
    Case("graph", "truth/graph.py"),
    Case("expandable", "truth/gpt.py", settings=conf("expandable_segments:True")),
    Case("roundup", "truth/odd.py", settings=conf("roundup_power2_divisions:8"), same_owners=False),
    Case("pool", "allocators/pluggable.py", ["pool"]),
    Case("io", "truth/gpt.py", settings={"MEMTRACE_OPS": "io"}),
    Case("stacks", "truth/conv.py", settings={"MEMTRACE_STACKS": "python"}),
    Case("fork", "processes/children.py", ["fork"]),
    Case("fork first", "processes/children.py", ["fork first"]),
    Case("subprocess", "processes/children.py", ["subprocess"]),
    Case("kill", "processes/kill_rounds.py", ["3"], same_owners=False, has_checkpoints=False),
    Case("compile", "owners/owner_cases.py", ["compiled"], has_checkpoints=False),
]


class Machine:
    """This machine, or the one that qemu simulates: how a program starts there, and its view of the tree."""

    def __init__(self, name, python, prefix, tree, built):
        self.name, self.python, self.prefix, self.tree, self.built = name, python, prefix, tree, built

    def run(self, case):
        """Runs a case, and returns its folder."""
        folder = OUT / self.name / case.name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        inside = self.tree / folder.relative_to(ROOT)
        settings = {
            "LD_PRELOAD": f"{self.built}/libmemtrace.so:{self.built}/libmemtrace_phantom.so",
            "MEMTRACE_PHANTOM": "h100-80g",
            "MEMTRACE_OUT": f"{inside}/trace",
            "MEMTRACE_TEST_CHECKPOINTS": f"{inside}/checkpoints",
            "OWNER_OUT": str(inside),
            "PYTHONHASHSEED": "0",
            **case.settings,
        }
        variables = [f"{name}={value}" for name, value in settings.items()]
        script = self.tree / "tests/scripts" / case.script
        command = [*self.prefix, "env", *variables, self.python, str(script), *case.arguments]
        begin = time.monotonic()
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        self.seconds = time.monotonic() - begin
        (folder / "stdout").write_text(run.stdout)
        (folder / "stderr").write_text(run.stderr)
        if run.returncode != 0:
            raise RuntimeError(f"{self.name}: status {run.returncode}: {run.stderr[-800:]}")
        return folder


def checked(folder, case):
    """Returns what differs between the traces of a folder, and torch and the rules of the format."""
    found = []
    traces = sorted((folder / "trace").glob("*.csv"))
    if not traces:
        return ["no trace"]
    command = [BUILT / "memtrace", "check", "--repair", folder / "trace"]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    if check.returncode != 0:
        found.append(f"memtrace check: {check.stdout[-400:]}{check.stderr[-400:]}")
    if case.has_checkpoints:
        marked = [trace for trace in traces if "checkpoint:0" in trace.read_text()]
        command = [sys.executable, ROOT / "tests/scripts/checkers/verify.py", *marked, folder / "checkpoints"]
        verify = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"    torch: {verify.stdout.strip().splitlines()[-1] if verify.stdout else verify.stderr[-400:]}")
        if verify.returncode != 0:
            found.append(f"verify.py: {verify.stdout[-800:]}")
    if case.name == "kill":
        found += repaired(folder, traces)
    return found


def rows(trace):
    with trace.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def repaired(folder, traces):
    """Compares the repaired traces of killed processes with the blocks that each process reported."""
    found = []
    for line in (folder / "stdout").read_text().splitlines():
        process, count = line.split()
        [trace] = [trace for trace in traces if trace.name.endswith(f".{process}.csv")]
        taken = [int(row["delta_bytes"]) for row in rows(trace) if row["event"] == "alloc"]
        print(f"    killed process: {count} blocks reported, {len(taken)} in the repaired trace")
        # The process may have been killed between an allocation and its report.
        if len(taken) - int(count) not in (0, 1):
            found.append(f"process {process}: {count} blocks, {len(taken)} in the trace")
        if taken != [512 * (index % 1000 + 1) for index in range(len(taken))]:
            found.append(f"process {process}: other blocks")
    return found


def owners(folder):
    """Returns how often each owner occurs in the allocations of all traces of a folder."""
    found = collections.Counter()
    for trace in sorted((folder / "trace").glob("*.csv")):
        for row in rows(trace):
            if row["event"] in ("alloc", "tag", "oom"):
                found[(row["event"], *(row[column] for column in OWNER))] += 1
    return found


def main():
    python, python_of_qemu, *names = sys.argv[1:]
    prefix = [str(ROOT / "scripts/aarch64"), "run"]
    qemu = Machine("aarch64", python_of_qemu, prefix, QEMU_TREE, QEMU_BUILT)
    here = Machine("x86-64", python, [], ROOT, BUILT)
    failed = []
    for case in [case for case in CASES if not names or case.name in names]:
        print(f"{case.name}: {case.script} {' '.join(case.arguments)}", flush=True)
        try:
            folder = qemu.run(case)
            print(f"    {qemu.seconds:.0f} s under qemu")
            differences = checked(folder, case)
            if case.same_owners:
                ours, theirs = owners(folder), owners(here.run(case))
                print(f"    x86-64: {sum(theirs.values())} rows with owners, {len(theirs)} different")
                differences += [f"only on aarch64: {n} {row}" for row, n in (ours - theirs).items()]
                differences += [f"only on x86-64: {n} {row}" for row, n in (theirs - ours).items()]
        except RuntimeError as error:
            differences = [str(error)]
        if differences:
            failed.append(case.name)
        for difference in differences[:MOST_SHOWN]:
            print(f"    {difference}")
        print(f"    {'differs' if differences else 'equal'}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "every case is equal")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
