"""The checks of one cell of scripts/test-matrix: a torch on a Python.

All cases of capabilities.py run in one traced process, which forks a child for each. Each child leaves a
trace, which is compared with what the child printed, and with torch's own statistics.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from parts.built import BUILT, ROOT, cache, clean_environment, output_of

SCRIPTS = ROOT / "tests/scripts"
CARD = "h100-80g"
MACHINES = ["x86-64", "aarch64"]
# The root folder of scripts/aarch64, whose files have the same path there, has the build for aarch64.
QEMU_BUILT = cache() / "aarch64/target/aarch64-unknown-linux-gnu/release"
# Seconds for all cases of a process, also on a busy machine.
LIMITS = {"x86-64": 1800, "aarch64": 5400}
# The checks in the order of the table, each with its heading there.
CHECKS = {
    "totals": "totals",
    "modules": "modules",
    "lines": "Python lines",
    "retained": "holders",
    "observers": "profilers",
    "loader": "DataLoader",
    "threads": "8 threads",
    "compile": "torch.compile",
}
# Checks of what a free-threaded Python does not have. There the trace must say so.
NOT_FREE_THREADED = {"lines": "no Python lines", "retained": "no search for holders"}
TOOLS = ["training", "profile", "trace", "cprofile", "coverage", "debugger", "torch_profiler"]


class Failed(Exception):
    """A check does not hold; the text says what differs."""


@dataclass
class Case:
    """What a case left: its output and its trace."""

    text: str
    trace: Path
    checkpoints: Path

    def values(self) -> list[dict]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]


class Cell:
    """A torch on a Python, of this machine or under qemu. `names` are the checks that will run. `folder` is
    empty, is in the tree, and gets the traces."""

    def __init__(
        self, machine: str, torch: str, python: str, interpreter: Path, names: list[str], folder: Path
    ):
        self.torch, self.interpreter, self.names, self.folder = torch, interpreter, names, folder
        self.is_qemu, self.limit = machine == "aarch64", LIMITS[machine]
        self.built = QEMU_BUILT if self.is_qemu else BUILT
        self.is_free_threaded = python.endswith("t")
        query = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
        status, output = self.run([interpreter, "-c", query], {})
        if status:
            sys.exit(f"test-matrix: {interpreter} does not start: {last_line(output)}")
        self.version = output.strip()

    def run(self, command: list, settings: dict[str, str]) -> tuple[int, str]:
        """Runs a command of the cell's machine, as `run` does."""
        if not self.is_qemu:
            return run(command, clean_environment("PYTORCH_") | settings, self.limit)
        variables = [f"{name}={value}" for name, value in settings.items()]
        return run([ROOT / "scripts/aarch64", "run", "env", *variables, *command], None, self.limit)

    def check(self, name: str) -> tuple[str, str]:
        """Runs one check. Returns its result (yes, no, failed, impossible) and the reason."""
        try:
            if name == "observers":
                return "yes", self.check_observers()
            case = self.cases().get(name) or self.alone(name)
            getattr(self, f"check_{name}")(case)
        except Failed as failure:
            if name != "observers" and (reason := self.fails_untraced(name)):
                return "impossible", f"torch {self.torch}: {reason}"
            return "failed", str(failure)
        if self.is_free_threaded and name in NOT_FREE_THREADED:
            return "no", NOT_FREE_THREADED[name]
        return "yes", ""

    @functools.cache  # noqa: B019
    def cases(self) -> dict[str, Case]:
        """Runs all cases in one traced process. After a case that fails, the others have no result."""
        names = [name for name in self.names if name != "observers"]
        if len(names) < 2:
            return {}
        return self.traced("all", names)[0]

    def alone(self, name: str) -> Case:
        """Runs a case in a traced process of its own."""
        cases, output = self.traced(name, [name])
        if name not in cases:
            raise Failed(output)
        return cases[name]

    def traced(self, folder: str, names: list[str]) -> tuple[dict[str, Case], str]:
        """Runs cases in one traced process. Returns those that ended well, and how the process ended."""
        out = self.folder / folder
        out.mkdir()
        environment = self.environment(out) | {"MEMTRACE_STACKS": "python", "MEMTRACE_RETAINED": "60"}
        status, output = self.run(
            [*self.memtrace_run(out / "trace"), self.script("versions/capabilities.py"), *names], environment
        )
        end = f"status {status}: {last_line(output)}"
        # A single case does not print its name, because it runs in the process itself.
        if len(names) == 1:
            traces = sorted((out / "trace").glob("*.csv"), key=lambda path: int(path.suffixes[-2][1:]))
            if status or not traces:
                return {}, end
            return {names[0]: Case(output, traces[0], out / "checkpoints")}, end
        found = {}
        for block in output.split("== ")[1:]:
            head, _, text = block.partition("\n")
            name, _, process = head.rpartition(" ")
            traces = list((out / "trace").glob(f"*.{process}.csv"))
            if name in names and traces:
                found[name] = Case(text, traces[0], out / f"checkpoints.{name}")
        # The last case may be the one that failed.
        if status and found:
            found.popitem()
        return found, end

    def memtrace_run(self, out: Path) -> list:
        """Returns the command that traces a Python script into a folder."""
        command = [self.built / "memtrace", "run", "--quiet", "--phantom", CARD]
        return [*command, "-o", out, "--", self.interpreter]

    def environment(self, out: Path) -> dict[str, str]:
        return {
            "MEMTRACE_TEST_CHECKPOINTS": str(out / "checkpoints"),
            "OWNER_OUT": str(out),
            "PYTHONPATH": str(ROOT / "python"),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            # triton, which optimizers import, would turn the GIL on again.
            **({"PYTHON_GIL": "0"} if self.is_free_threaded else {}),
        }

    def script(self, name: str) -> Path:
        return SCRIPTS / name

    def untraced(self, script: str, *arguments: str) -> tuple[int, str]:
        preload = {"LD_PRELOAD": str(self.built / "libmemtrace_phantom.so"), "MEMTRACE_PHANTOM": CARD}
        return self.run(
            [self.interpreter, self.script(script), *arguments], self.environment(self.folder) | preload
        )

    def fails_untraced(self, name: str) -> str:
        """Returns the last line of a case that fails without memtrace, too."""
        # The search for holders is memtrace's own.
        if name == "retained":
            return ""
        status, output = self.untraced("versions/capabilities.py", name)
        return last_line(output) if status else ""

    def check_totals(self, case: Case) -> None:
        verify = self.script("checkers/verify.py")
        for status, output in (
            run([sys.executable, verify, case.trace, case.checkpoints], None, self.limit),
            self.run([self.built / "memtrace", "check", case.trace], {}),
        ):
            if status:
                raise Failed(last_line(output))

    check_loader = check_compile = check_totals

    def check_threads(self, case: Case) -> None:
        self.check_totals(case)
        (found,) = case.values()
        if found["gil"] == self.is_free_threaded:
            raise Failed(f"the GIL is {'on' if found['gil'] else 'off'}")

    def check_modules(self, case: Case) -> None:
        (wanted,) = case.values()
        found = {row["module"] for row in blocks(case, wanted["size"])}
        if missing := [module for module in wanted["modules"] if module not in found]:
            raise Failed(f"no block of {missing[0]}; there are {', '.join(sorted(found))}")

    def check_lines(self, case: Case) -> None:
        (wanted,) = case.values()
        (block,) = blocks(case, wanted["size"])
        lines = stack(case.trace, int(block["stack_id"]))
        expected = [f"capabilities.py:{line} {name}" for name, line in wanted["lines"]]
        if self.is_free_threaded:
            self.says_what_is_missing(case, "lines")
            expected = []
        if lines != expected:
            raise Failed(f"the lines {lines} are not {expected}")

    def check_retained(self, case: Case) -> None:
        (wanted,) = case.values()
        holders = wanted["holders"]
        if self.is_free_threaded:
            self.says_what_is_missing(case, "retained")
            if holders:
                raise Failed(f"holders {holders}")
        elif len(holders) != 1 or not holders[0].startswith("list `history` of retained()"):
            raise Failed(f"holders {holders}")

    def says_what_is_missing(self, case: Case, name: str) -> None:
        with open(case.trace, newline="", encoding="utf-8") as file:
            meta = next(row["name"] for row in csv.DictReader(file) if row["event"] == "meta")
        if NOT_FREE_THREADED[name] not in meta:
            raise Failed(f"the trace does not say: {NOT_FREE_THREADED[name]}")

    def check_observers(self) -> str:
        """Compares what profilers and debuggers print with memtrace and without it. Returns which one was
        left out, because it fails without memtrace, too."""
        tools = [*TOOLS, *(["monitoring"] if tuple(map(int, self.version.split(".")[:2])) >= (3, 12) else [])]
        status, expected = self.untraced("observers/observers.py", *tools)
        left_out = ""
        # The script ends at the first tool that fails, and names it.
        if status and (broken := last_line(expected).removeprefix("AssertionError: ")) in tools[1:]:
            left_out = f"without {broken.replace('_', '.')}, which fails without memtrace, too"
            tools.remove(broken)
            status, expected = self.untraced("observers/observers.py", *tools)
        if status:
            raise Failed(f"without memtrace: {last_line(expected)}")
        out = self.folder / "observers"
        status, found = self.run(
            [*self.memtrace_run(out), self.script("observers/observers.py"), *tools],
            self.environment(self.folder),
        )
        if status:
            raise Failed(last_line(found))
        # Each child prints its process id, and a warning may name a process.
        lines = [
            re.sub(r"^(== \S+) \d+$", r"\1", text, flags=re.M).splitlines() for text in (found, expected)
        ]
        for ours, theirs in zip(*lines, strict=False):
            if ours != theirs:
                raise Failed(f"with memtrace {ours!r}, without {theirs!r}")
        if len(lines[0]) != len(lines[1]):
            raise Failed(f"with memtrace {len(lines[0])} lines, without {len(lines[1])}")
        return left_out


def run(command: list, environment: dict | None, limit: float) -> tuple[int, str]:
    """Runs a command for at most this many seconds. Returns its status, and stdout followed by stderr."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = output_of(process, limit)
    if output is None:
        return 124, f"ended after {limit} s"
    stdout, stderr = output
    return process.returncode, stdout + (stderr if process.returncode else "")


def last_line(text: str) -> str:
    """Returns the line of an error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no message"])[-1][:200]


def blocks(case: Case, size: int) -> list[dict]:
    """Returns the rows of the blocks that were requested with a size."""
    with open(case.trace, newline="", encoding="utf-8") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["event"] == "alloc" and int(row["requested_bytes"]) == size
        ]


def stack(trace: Path, number: int) -> list[str]:
    """Returns the Python lines of a stack, innermost first, without the folders of the files."""
    with open(trace.with_suffix(".stacks"), newline="", encoding="utf-8") as file:
        frames = {int(row["stack_id"]): row for row in csv.DictReader(file)}
    lines = []
    while number:
        frame = frames[number]
        if frame["kind"] == "python":
            lines.append(frame["frame"].rsplit("/", 1)[-1])
        number = int(frame["parent_id"])
    return lines
