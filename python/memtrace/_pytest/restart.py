"""Implements `pytest --memtrace`, which runs the same command line again under the tracer."""

from __future__ import annotations

import os
import sys

import pytest

from .. import _blocks, _command, _marks

OPTION = "--memtrace"
OUT_OPTION = "--memtrace-out"
# An environment variable. In a restarted process, it has the process id of the command that started the
# process; in the process of phantom tests, it is `1` or TEMPORARY. Its name does not start with MEMTRACE_,
# because it is not a setting of the tracer.
STARTED = "GPU_MEMTRACE_PYTEST"
# The value of STARTED if the traces are removed after the tests.
TEMPORARY = "temporary"

_sessions = 0


def card_of(value: str | None, arguments: list[str]) -> str | None:
    """Returns the card that the option requests, or None for the GPU of this machine.

    argparse takes the word after a bare `--memtrace` as the value of the option. This function corrects
    that, or raises UsageError."""
    exact = [word for word in arguments if word == OPTION or word.startswith(OPTION + "=")]
    if exact and exact[-1] == OPTION:
        return None
    if value and os.path.exists(value.split("::")[0]):
        raise _not_a_card(value)
    return value or None


def _not_a_card(value: str) -> pytest.UsageError:
    return pytest.UsageError(
        f"{OPTION} read {value} as the name of a card; write {OPTION}= before the names of tests, or "
        f"{OPTION}=CARD for a simulated GPU"
    )


def without_option(arguments: list[str]) -> list[str]:
    """Returns the arguments without `--memtrace`, in either form."""
    return [word for word in arguments if word != OPTION and not word.startswith(OPTION + "=")]


def restart_if_needed(config: pytest.Config) -> None:
    """Replaces this process by `memtrace run -- pytest ...` if `--memtrace` was given
    and it is not traced yet."""
    global _sessions
    _sessions += 1
    value = config.known_args_namespace.memtrace
    card = card_of(value, list(config.invocation_params.args))
    if _marks.is_traced():
        # Only a new process has the arguments without a bare option, which takes the next word.
        if value and card is None:
            raise _not_a_card(value)
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
    # Each process writes one plain file, because the limits read it while it is being written.
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
    """Returns the arguments with which this interpreter was started."""
    if hasattr(sys, "orig_argv"):
        return sys.orig_argv[1:]
    # Python 3.9 does not record them.
    return ["-m", "pytest", *config.invocation_params.args]
