"""The cases of tests/oom, and a run of one on a simulated GPU. For scripts/oom-corpus."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from .built import BUILT, ROOT, answer, clean_environment, installed

FOLDER = ROOT / "tests/oom"
LONGEST = 300  # the time limit of one run, in seconds
LARGER = "800g"  # the memory of the larger card
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class Case:
    """One row of cases.csv. A *change* is words: NAME=VALUE settings, and arguments for the program."""

    name: str
    program: str  # the script and its arguments
    steps: int
    card: str
    options: str  # the options of memtrace run
    environment: str  # the settings, NAME=VALUE
    remedy: str  # a change with which the program finishes; empty without a remedy
    alone: str  # a change without memory of others or outside torch, or `card SPEC`; empty if no change does
    releases: bool  # True if the remedy keeps less memory without a change of the results
    advice: str  # a regular expression for a line of advice that names the remedy
    cause: str
    also: str  # a second verdict that is also right, or empty

    @staticmethod
    def read(row: dict[str, str]) -> Case:
        """Parses a row of cases.csv."""
        return Case(**(row | {"steps": int(row["steps"]), "releases": row["releases"] == "yes"}))


@dataclass(frozen=True)
class Way:
    """The card, the options and the changes with which a case runs."""

    card: str
    steps: int
    options: str  # the options of memtrace run
    change: str = ""
    applied: str = ""  # a change of tests/oom/applied.py


@dataclass(frozen=True)
class Run:
    """One finished run; all sizes are in bytes."""

    status: int
    ooms: int
    allocated: int
    reserved: int
    used: int
    processes: int
    error: str

    @property
    def fits(self) -> str:
        """Returns `yes` if the run finished without an OOM, else `no`."""
        return "no" if self.ooms or self.status else "yes"


def read_cases() -> dict[str, Case]:
    """Returns the rows of cases.csv by name, in file order."""
    with (FOLDER / "cases.csv").open(newline="") as file:
        return {row["name"]: Case.read(row) for row in csv.DictReader(file)}


def settings(words: str) -> tuple[dict[str, str], list[str]]:
    """Returns the settings NAME=VALUE of a text, and its other words."""
    found = [re.fullmatch(r"([A-Z_]+)=(.*)", word) or word for word in words.split()]
    named = dict(word.groups() for word in found if isinstance(word, re.Match))
    return named, [word for word in found if isinstance(word, str)]


class Forks:
    """A process that has imported the libraries, and runs programs in forks of itself."""

    def __init__(self) -> None:
        self.kept = tempfile.TemporaryDirectory(prefix="memtrace-oom-forks-")
        self.folder = Path(self.kept.name, "out")
        command = [
            BUILT / "memtrace",
            "run",
            "--quiet",
            "--phantom",
            f"rtx4090,mem={LARGER}",
            "-o",
            self.folder,
        ]
        # Makes torch detect the GPU through NVML, because a process cannot fork after a CUDA call.
        environment = own_environment() | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self.process = subprocess.Popen(
            [*command, "--", installed("programs"), FOLDER / "forked.py"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, argv: list[str], environment: dict[str, str], scratch: str, out: Path) -> tuple[int, str]:
        """Runs a program, with its trace in `out`. Returns its status and its output."""
        log = Path(scratch) / "log"
        job = {"argv": argv, "env": environment, "cwd": scratch, "log": str(log)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        process, status = json.loads(self.process.stdout.readline() or "[0, 1]")
        out.mkdir()
        for file in self.folder.glob(f"*.r*.{process}.*"):
            shutil.move(file, out / file.name)
        return status, log.read_text() if log.exists() else "the process that forks has ended"


THREAD = threading.local()


def own_environment() -> dict[str, str]:
    """Returns the environment without memtrace's settings, with libraries kept off the network."""
    kept = clean_environment()
    # Gives the search for holders 60 s, so that a busy machine gets the same verdicts.
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MEMTRACE_RETAINED": "60"}


def run(case: Case, way: Way, out: Path, fork: bool = False) -> Run:
    """Runs a case with its trace in `out`; with `fork`, in a fork if that is equivalent."""
    changed, added = settings(way.change)
    environment = settings(case.environment)[0] | changed
    script, *arguments = [*case.program.split(), *added]
    argv = [str(FOLDER / script), *arguments]
    if way.applied:
        argv = [str(FOLDER / "applied.py"), way.applied, *argv]
    # A case with settings cannot run in a fork, because the allocator reads them during an import. A program
    # with child processes cannot, because the children have traces of their own.
    can_fork = not environment and not way.options and way.card[0].isalpha() and script != "neighbour.py"
    environment["STEPS"] = str(way.steps)
    with tempfile.TemporaryDirectory(prefix="memtrace-oom-") as scratch:
        if fork and can_fork:
            if not hasattr(THREAD, "forks"):
                THREAD.forks = Forks()
            environment["MEMTRACE_PHANTOM"] = way.card
            status, printed = THREAD.forks.run(argv, environment, scratch, out)
        else:
            command = [BUILT / "memtrace", "run", "--quiet", "--phantom", way.card, *way.options.split()]
            done = subprocess.run(
                [*command, "-o", out, "--", installed("programs"), *argv],
                env=own_environment() | environment,
                cwd=scratch,
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
            status, printed = done.returncode, done.stderr
    processes = answer("summary", out)["processes"]
    devices = [device for process in processes for device in process["devices"]]
    peaks = {
        name: max((device[f"peak_{name}"]["bytes"] for device in devices), default=0)
        for name in ("allocated", "reserved", "used")
    }
    lines = printed.splitlines() or [""]
    errors = [line for line in lines if re.match(r"(\S*: )?[\w.]*(Error|Exception)\b", line)]
    return Run(
        status=status,
        ooms=len(answer("oom", out)["ooms"]),
        **peaks,
        processes=len(processes),
        error=(errors or lines)[-1][:200],
    )


def asked(trace: Path) -> tuple[str, list[str], int, int]:
    """Returns the verdict and the advice of `memtrace oom`, the size of the request, and
    the memory of the card."""
    found = answer("oom", trace)["ooms"]
    if not found:
        return "", [], 0, 0
    advice = [*found[0]["try"], *map(str, found[0]["advised"] or [])]
    return found[0]["verdict"], advice, found[0]["requested_bytes"], found[0]["capacity_bytes"]
