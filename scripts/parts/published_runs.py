"""Runs published cases on simulated GPUs, each in its own process, several at a time. Caches the results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .built import ROOT, cache, clean_environment, output_of
from .published_figures import Run

# Inherited settings with these prefixes would change the answer, so they are removed. A case sets its own.
OUTSIDE = ("PYTORCH_", "CUDA_", "NCCL_", "TORCH")
FILES = ("memtrace", "libmemtrace.so", "libmemtrace_phantom.so")


@dataclass
class Outcome:
    """The values that a run printed, by label and quantity, or the reason why it printed none."""

    values: dict[str, dict[str, int]] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    cached: bool = False


def cache_folder() -> Path:
    return cache() / "published"


class Runner:
    """Runs cases with the libraries of one build, and keeps their outcomes."""

    def __init__(self, target: Path, folder: Path, timeout: float, fresh: bool = False) -> None:
        self.target, self.folder, self.timeout, self.fresh = target, folder, timeout, fresh
        self.lock = threading.Lock()
        self.live: set[int] = set()
        self.stopped = False
        build = hashlib.sha256()
        for name in FILES:
            build.update((target / name).read_bytes())
        self.build = build.hexdigest()

    def run_all(self, runs: Iterable[Run], jobs: int) -> dict[Run, Outcome]:
        wanted = list(dict.fromkeys(runs))
        done = 0

        def one(run: Run) -> Outcome:
            nonlocal done
            if self.stopped:
                return Outcome(failure="stopped")
            outcome = self.outcome(run)
            with self.lock:
                done += 1
                state = (
                    "failed"
                    if outcome.failure
                    else "cached"
                    if outcome.cached
                    else f"{outcome.seconds:.0f} s"
                )
                print(f"[{done}/{len(wanted)}] {run}: {state}", file=sys.stderr, flush=True)
            return outcome

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            try:
                return dict(zip(wanted, pool.map(one, wanted)))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise

    def stop(self) -> None:
        """Ends the running cases, each with the workers that it started."""
        self.stopped = True
        for process in list(self.live):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)

    def outcome(self, run: Run) -> Outcome:
        script = self.folder / f"{run.case}.py"
        code = b"".join(path.read_bytes() for path in sorted(imported(script, self.folder)))
        key = hashlib.sha256(self.build.encode() + code + repr(run).encode()).hexdigest()
        kept = cache_folder() / f"{key}.json"
        if not self.fresh:
            try:
                return Outcome(values=json.loads(kept.read_text()), cached=True)
            except (OSError, ValueError):
                pass  # The run is not in the cache.
        started = time.monotonic()
        outcome = self.launch(run, script)
        outcome.seconds = time.monotonic() - started
        if not outcome.failure:
            kept.parent.mkdir(parents=True, exist_ok=True)
            # A unique name, so that each of two simultaneous callers writes a complete file.
            unfinished = kept.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            unfinished.write_text(json.dumps(outcome.values))
            unfinished.replace(kept)
        return outcome

    def launch(self, run: Run, script: Path) -> Outcome:
        try:
            python = self.python(run.torch)
            packages = self.libraries(python, run)
        except RuntimeError as error:
            return Outcome(failure=str(error))
        environment = clean_environment(*OUTSIDE)
        environment["MEMTRACE_CACHE"] = str(cache())
        environment["PYTHONPATH"] = packages
        environment["HF_HUB_OFFLINE"] = "1"
        with tempfile.TemporaryDirectory(prefix="memtrace-published-") as scratch:
            command = [str(self.target / "memtrace"), "run", "-q", "-o", f"{scratch}/trace"]
            command += ["--phantom", *run.card.split(), "--"]
            command += [python, str(script), *shlex.split(run.arguments)]
            return self.finish(command, environment, scratch)

    def finish(self, command: list[str], environment: dict[str, str], folder: str) -> Outcome:
        # In a process group of its own, so that the case's workers also end at the time limit.
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.live.add(process.pid)
        try:
            both = output_of(process, self.timeout)
        finally:
            self.live.discard(process.pid)
        if both is None:
            return Outcome(failure=f"not finished after {self.timeout:.0f} s; --timeout allows more")
        output, errors = both
        if process.returncode:
            last = "\n".join(errors.strip().splitlines()[-12:])
            return Outcome(failure=f"exit status {process.returncode}\n{last}")
        return read_output(output)

    def python(self, version: str) -> str:
        with self.lock:
            done = subprocess.run(
                [str(ROOT / "scripts/env"), "torch", version],
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise RuntimeError(f"scripts/env torch {version} failed\n{done.stderr.strip()}")
        return done.stdout.strip().splitlines()[-1]

    def libraries(self, python: str, run: Run) -> str:
        """Returns the folder of the libraries that the case needs in place of those from scripts/env. The
        list is complete: pip installs no dependencies, because they would bring another torch."""
        if not run.libraries:
            return ""
        name = hashlib.sha256(f"{run.torch} {run.libraries}".encode()).hexdigest()[:16]
        folder = cache_folder() / f"libraries-{name}"
        with self.lock:
            if not (folder / ".complete").exists():
                command = [python, "-m", "pip", "install", "--quiet", "--progress-bar", "off", "--no-deps"]
                command += ["--upgrade", "--target", str(folder), *run.libraries.split()]
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                if done.returncode:
                    raise RuntimeError(
                        f"pip could not install {run.libraries}\n{done.stdout.strip()[-2000:]}"
                    )
                (folder / ".complete").touch()
        return str(folder)


def imported(script: Path, folder: Path) -> set[Path]:
    """Returns the script and the modules of the folder that it imports, directly or indirectly."""
    found: set[Path] = set()
    left = [script]
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for module, names in re.findall(
            r"^ *(?:from|import) +([\w.]+)(?: +import +(.*))?", path.read_text(), re.M
        ):
            base = folder.joinpath(*module.lstrip(".").split("."))
            inside = [base / name for name in re.findall(r"\w+", names)]
            left += [part.with_suffix(".py") for part in (base, *inside)]
            left += [parent / "__init__.py" for parent in (base, base.parent)]
    return found


def read_output(output: str) -> Outcome:
    """Parses the JSON lines that a case printed. Other lines are from libraries and are ignored."""
    values: dict[str, dict[str, int]] = {}
    for line in output.splitlines():
        if not line.startswith('{"label"'):
            continue
        try:
            record = json.loads(line)
            label = str(record.pop("label"))
            numbers = {str(name): int(value) for name, value in record.items()}
        except (ValueError, TypeError) as error:
            return Outcome(failure=f"printed an invalid line: {line[:200]} ({error})")
        values.setdefault(label, {}).update(numbers)
    return Outcome(values=values) if values else Outcome(failure="printed no figure")
