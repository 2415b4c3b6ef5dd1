"""`pytest --memtrace`: the same command line again, under the tracer."""

from __future__ import annotations

import os
import sys

import pytest

from .. import _blocks, _command, _marks

OPTION = "--memtrace"
OUT_OPTION = "--memtrace-out"
# Set in the process that was started again, to the process id of the command that started it. Not a MEMTRACE_
# variable: the tracer does not know it.
STARTED = "GPU_MEMTRACE_PYTEST"
# Its value when the traces are removed after the tests.
TEMPORARY = "temporary"

_sessions = 0


def card_of(value: str, arguments: list[str]) -> str | None:
    """The card that the option asks for; None for the GPU of this machine. A bare `--memtrace` takes the next
    word of the command line as its value, which is not meant."""
    exact = [word for word in arguments if word == OPTION or word.startswith(OPTION + "=")]
    if exact and exact[-1] == OPTION:
        return None
    if value and os.path.exists(value.split("::")[0]):
        raise pytest.UsageError(
            f"{OPTION} took {value} for the name of a card; write {OPTION}= before the names of tests, or "
            f"{OPTION}=CARD for a simulated GPU"
        )
    return value or None


def without_option(arguments: list[str]) -> list[str]:
    """The arguments without `--memtrace`, in either form."""
    return [word for word in arguments if word != OPTION and not word.startswith(OPTION + "=")]


def restart_if_needed(config: pytest.Config) -> None:
    """Replaces this process by `memtrace run -- pytest ...` when `--memtrace` asks for it, once."""
    global _sessions
    _sessions += 1
    value = config.known_args_namespace.memtrace
    if _marks.is_traced():
        return
    started = os.environ.get(STARTED)
    is_restarted = started == str(os.getppid()) or config.known_args_namespace.memtrace_reports
    if is_restarted or started is not None and value is not None:
        raise pytest.UsageError(
            f"{OPTION}: this process was started to be traced ({STARTED} is set), and is not: LD_PRELOAD was "
            "removed, MEMTRACE_ENABLED is 0, or the tracer cannot be loaded into this Python; memtrace "
            "doctor says why"
        )
    if value is None:
        if config.known_args_namespace.memtrace_out:
            raise pytest.UsageError(f"{OUT_OPTION} has no effect without {OPTION}: nothing is traced")
        return
    if _sessions > 1:
        raise pytest.UsageError(
            f"{OPTION} starts the whole process again, and another pytest session runs in this one; "
            f"give {OPTION} to the outer pytest"
        )
    card = card_of(value, list(config.invocation_params.args))
    try:
        command = [_command.find(), "run", "--quiet"]
        libraries = [["lib"], ["lib", "--phantom"]] if card else [["lib"]]
        for library in libraries:
            _command.run(library)
    except _command.TraceError as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from error
    if card:
        command += ["--phantom", card]
    if config.known_args_namespace.memtrace_out:
        command += ["--out", config.known_args_namespace.memtrace_out]
    command += ["--", sys.executable, *without_option(_own_arguments(config))]
    sys.stdout.flush()
    sys.stderr.flush()
    # One plain file for each process: the limits read it while it is written.
    os.execve(
        command[0],
        command,
        {
            **os.environ,
            **dict.fromkeys(_blocks.SPLITTING, "0"),
            "MEMTRACE_COMPRESS": "off",
            STARTED: str(os.getpid()),
        },
    )


def _own_arguments(config: pytest.Config) -> list[str]:
    """The arguments of this interpreter."""
    if hasattr(sys, "orig_argv"):
        return sys.orig_argv[1:]
    # Python 3.9 does not keep them.
    return ["-m", "pytest", *config.invocation_params.args]
