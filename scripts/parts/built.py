"""The release build, the installed programs and the environment, for the scripts that run memtrace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


def cache() -> Path:
    """Returns the folder into which `scripts/env` installs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MEMTRACE_CACHE") or Path(home) / "memtrace")


def clean_environment(*prefixes: str) -> dict[str, str]:
    """Returns the environment without the settings of memtrace and the variables with these prefixes."""
    dropped = ("MEMTRACE_", *prefixes)
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def installed(*name: str) -> str:
    """Installs a program by `scripts/env`, unless it is installed. Returns its path."""
    done = subprocess.run([ROOT / "scripts/env", *name], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{Path(sys.argv[0]).name}: scripts/env {' '.join(name)} failed")
    return done.stdout.splitlines()[-1]


def output_of(process: subprocess.Popen, seconds: float) -> tuple[str, str] | None:
    """Waits for a process that leads a session of its own. Returns stdout and stderr, or None after the time
    limit, which also ends its children."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None


def answer(report: str, trace: Path, *options: str) -> dict:
    """Returns the JSON answer of a report on a trace."""
    command = [BUILT / "memtrace", report, "--json", *options, trace]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"memtrace {report}: {done.stderr.strip()}")
    return json.loads(done.stdout)
