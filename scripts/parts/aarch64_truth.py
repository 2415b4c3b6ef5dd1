"""Traces programs with PyTorch on the simulated GPU under qemu, and compares the traces.

    aarch64_truth.py PYTHON PYTHON_OF_QEMU [RUN...]

With torch: the checkers of `tests/scripts/checkers` compare each trace with torch's own figures. With
x86-64: the same program runs on this machine, and its allocations must have the same owners.
`scripts/aarch64 truth` calls this. PYTHON is an interpreter of this machine with the same version of
PyTorch, and PYTHON_OF_QEMU that of the root folder. Exits with status 1 if a case differs.
"""

from __future__ import annotations

import collections
import csv
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from built import BUILT, ROOT

OUT = ROOT / "target/aarch64-truth"
CHECKERS = ROOT / "tests/scripts/checkers"
# The tree has the same path in the root folder of qemu, because a journal names the file of its trace.
QEMU_TREE = ROOT
QEMU_BUILT = Path("/target/aarch64-unknown-linux-gnu/release")
OWNER = ("device", "delta_bytes", "requested_bytes", "op", "module", "phase", "step", "category")
MOST_SHOWN = 5

# Importing torch takes a minute under qemu, so several programs run in forked children of one interpreter.
FORKED = """
import os, runpy, shlex, sys, torch
for line in sys.argv[1:]:
    name, script, *arguments = shlex.split(line)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print("==", name, os.getpid(), flush=True)
        os.environ["MEMTRACE_TEST_CHECKPOINTS"] += "." + name
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        print("==", name, "failed", flush=True)
"""


@dataclass
class Run:
    """A run of one interpreter: a program of `tests/scripts`, or several in forked children."""

    name: str
    programs: list[str]
    checker: str | None = "verify"
    settings: dict[str, str] = field(default_factory=dict)
    # Programs whose threads or kills make another sequence in each run.
    differs: tuple[str, ...] = ()


def conf(text):
    return {"PYTORCH_CUDA_ALLOC_CONF": text}


CASES = (
    "exception outside_root shared roots late checkpoint_free custom_function double_backward accumulation "
    "manual_sgd inference compiled"
)
SMALL_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "0"}
RUNS = [
    Run(
        "truth",
        [
            "gpt truth/gpt.py",
            "conv truth/conv.py",
            "odd truth/odd.py",
            "streams truth/streams.py",
            "graph truth/graph.py",
            "pool allocators/pluggable.py pool",
        ],
        differs=("odd",),
    ),
    Run(
        "models",
        ["owners/owner_models.py gpt resnet llama bert lstm tied gan unet"],
        "owner_totals",
        SMALL_WORKSPACES,
    ),
    Run("cases", ["owners/owner_cases.py " + CASES], "expected_owners"),
    Run("expandable", ["truth/gpt.py"], settings=conf("expandable_segments:True")),
    Run("roundup", ["truth/odd.py"], settings=conf("roundup_power2_divisions:8"), differs=("",)),
    Run("io", ["truth/gpt.py"], settings={"MEMTRACE_OPS": "io"}),
    Run("fork", ["processes/children.py fork"]),
    Run("fork first", ["processes/children.py 'fork first'"]),
    Run("subprocess", ["processes/children.py subprocess"]),
    Run("kill", ["processes/kill_rounds.py 4"], "kill", differs=("",)),
]


class Machine:
    """This machine, or the one that qemu simulates: how a program starts there, and its view of the tree."""

    def __init__(self, name, python, prefix, tree, built):
        self.name, self.python, self.prefix, self.tree, self.built = name, python, prefix, tree, built

    def run(self, run):
        """Runs the programs, and returns their folder."""
        folder = OUT / self.name / run.name.replace(" ", "-")
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
            "PYTHONDONTWRITEBYTECODE": "1",
            **run.settings,
        }
        scripts = self.tree / "tests/scripts"
        if len(run.programs) == 1:
            program = shlex.split(f"{scripts}/{run.programs[0]}")
        else:
            placed = [line.split(" ", 1) for line in run.programs]
            program = ["-c", FORKED, *(f"{name} {scripts}/{script}" for name, script in placed)]
        variables = [f"{name}={value}" for name, value in settings.items()]
        begin = time.monotonic()
        ended = subprocess.run(
            [*self.prefix, "env", *variables, self.python, *program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        self.seconds = time.monotonic() - begin
        (folder / "stdout").write_text(ended.stdout)
        (folder / "stderr").write_text(ended.stderr)
        # A program with several cases prints which of them failed, as FORKED does.
        if ended.returncode != 0 or re.search(r" failed$|: status \d", ended.stdout, re.MULTILINE):
            raise RuntimeError(f"{self.name}: status {ended.returncode}: {ended.stderr[-800:]}")
        return folder


def traces_by_program(folder, run):
    """Returns the name and the traces of each program: of the forked child, or of all its processes."""
    traces = sorted((folder / "trace").glob("*.csv"))
    if len(run.programs) == 1:
        return {"": traces}
    heads = [line.split() for line in (folder / "stdout").read_text().splitlines() if line.startswith("== ")]
    return {name: [t for t in traces if t.name.endswith(f".{pid}.csv")] for _, name, pid in heads}


def command(*arguments):
    """Runs a checker; returns its last line, and what it printed if it failed."""
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    printed = (ended.stdout + ended.stderr).strip()
    return printed.rpartition("\n")[2], [] if ended.returncode == 0 else [printed[:1200]]


def checked(folder, run):
    """Returns what differs between the traces of a folder, and torch and the rules of the format."""
    found = command(BUILT / "memtrace", "check", "--repair", folder / "trace")[1]
    checks = []
    if run.checker == "verify":
        for name, traces in traces_by_program(folder, run).items():
            marked = [trace for trace in traces if "checkpoint:0" in trace.read_text()]
            file = folder / ("checkpoints" + (f".{name}" if name else ""))
            checks.append((name, CHECKERS / "verify.py", *marked, file))
    elif run.checker == "owner_totals":
        for line in (folder / "stdout").read_text().splitlines():
            model, pid = line.split()
            [trace] = (folder / "trace").glob(f"*.{pid}.csv")
            checks.append((model, CHECKERS / "owner_totals.py", trace, folder / f"{model}.jsonl"))
    elif run.checker == "expected_owners":
        checks.append(("", CHECKERS / "expected_owners.py", folder))
    elif run.checker == "kill":
        found += repaired(folder)
    for name, *arguments in checks:
        last, wrong = command(sys.executable, *arguments)
        print(f"    torch: {name} {last}")
        found += wrong
    return found


def rows(trace):
    with trace.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def repaired(folder):
    """Compares the repaired traces of killed processes with the blocks that each process reported."""
    found = []
    for line in (folder / "stdout").read_text().splitlines():
        process, count = line.split()
        [trace] = (folder / "trace").glob(f"*.{process}.csv")
        taken = [int(row["delta_bytes"]) for row in rows(trace) if row["event"] == "alloc"]
        print(f"    killed process: {count} blocks reported, {len(taken)} in the repaired trace")
        # The process may have been killed between an allocation and its report.
        if len(taken) - int(count) not in (0, 1):
            found.append(f"process {process}: {count} blocks, {len(taken)} in the trace")
        if taken != [512 * (index % 1000 + 1) for index in range(len(taken))]:
            found.append(f"process {process}: other blocks")
    return found


def owners(folder, run):
    """Returns how often each owner occurs, in the programs that allocate the same in each run."""
    found = collections.Counter()
    for name, traces in traces_by_program(folder, run).items():
        for trace in traces if name not in run.differs else []:
            for row in rows(trace):
                if row["event"] in ("alloc", "tag", "oom"):
                    found[(name, row["event"], *(row[column] for column in OWNER))] += 1
    return found


def main():
    python, python_of_qemu, *names = sys.argv[1:]
    qemu = Machine("aarch64", python_of_qemu, [str(ROOT / "scripts/aarch64"), "run"], QEMU_TREE, QEMU_BUILT)
    here = Machine("x86-64", python, [], ROOT, BUILT)
    if unknown := set(names) - {run.name for run in RUNS}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}")
    failed = []
    for run in [run for run in RUNS if not names or run.name in names]:
        print(f"{run.name}: {'; '.join(run.programs)}", flush=True)
        try:
            folder = qemu.run(run)
            print(f"    {qemu.seconds:.0f} s under qemu")
            differences = checked(folder, run)
            if "" not in run.differs:
                ours, theirs = owners(folder, run), owners(here.run(run), run)
                print(f"    x86-64: {theirs.total()} rows with owners, {len(theirs)} different")
                differences += [f"only on aarch64: {n} {row}" for row, n in (ours - theirs).items()]
                differences += [f"only on x86-64: {n} {row}" for row, n in (theirs - ours).items()]
        except (RuntimeError, ValueError) as error:
            differences = [str(error)]
        if differences:
            failed.append(run.name)
        for difference in differences[:MOST_SHOWN]:
            print(f"    {difference}")
        print(f"    {'differs' if differences else 'equal'}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "every run is equal")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
