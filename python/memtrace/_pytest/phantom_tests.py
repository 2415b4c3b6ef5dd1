"""Implements the mark `phantom`, which runs a test on a simulated GPU.

A process keeps the card with which it was started. So these tests run in an inner pytest process for each
card, and the outer pytest passes its reports on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .. import _blocks, _command
from . import limits, restart

MARK = "phantom"
# The option that names the file to which the inner pytest writes its reports.
CHILD_OPTION = "--memtrace-reports"
# The file beside it with the tests that the inner pytest runs.
TESTS = "tests.json"
# The maximum number of lines of the inner pytest's output that a failure shows.
LAST_LINES = 40


def card_of(item: pytest.Item) -> str | None:
    """Returns the card of a test's mark, or None without the mark.

    Raises UsageError for an invalid mark."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return None
    arguments = [*mark.args, *mark.kwargs.values()]
    if len(arguments) != 1 or not isinstance(arguments[0], str) or not arguments[0].strip():
        raise pytest.UsageError(
            f"{item.nodeid}: {MARK} takes the name of a card, such as @pytest.mark.{MARK}('h100-80g'); "
            "memtrace run --phantom list lists them"
        )
    return arguments[0]


class PhantomTests:
    """Runs marked tests in an inner pytest. Inside the inner pytest, writes its reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._items: list[pytest.Item] = []
        self._target = config.getoption(CHILD_OPTION)
        if self._target:
            # These tests replace the tests of the command line, of `testpaths` and of `addopts`.
            config.args = json.loads(Path(self._target).with_name(TESTS).read_text(encoding="utf-8"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = list(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._target:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            with open(self._target, "a", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")

    # Runs before the protocol of `limits`, because the inner pytest checks the limits.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        card = card_of(item)
        if card is None or self._target or card == os.environ.get("MEMTRACE_PHANTOM"):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if not is_complete(self._reports.get(item.nodeid, [])):
            self._run(item, card)
        for report in self._reports.pop(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, card: str) -> None:
        """Runs `item` and, except with xdist, all later tests for the same card."""
        batch = [item]
        if not hasattr(self._config, "workerinput"):
            later = self._items[self._items.index(item) + 1 :]
            batch += [other for other in later if card_of(other) == card]
        folder = Path(tempfile.mkdtemp(prefix="memtrace-pytest-"))
        try:
            why = self._run_inner(batch, card, folder)
            for report in self._read(folder / "reports"):
                self._reports.setdefault(report.nodeid, []).append(report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        own = self._reports.setdefault(item.nodeid, [])
        if not is_complete(own):
            # The process ended during this test. The later tests run in another process.
            own.append(failure(item, why))

    def _run_inner(self, batch: list[pytest.Item], card: str, folder: Path) -> str:
        """Runs the inner pytest. Returns the error message for a test without a report."""
        root = self._config.rootpath
        names = [str(root / path) + rest for path, rest in map(split_nodeid, batch)]
        (folder / TESTS).write_text(json.dumps(names), encoding="utf-8")
        environment = _command.untraced_environment()
        for name in ("MEMTRACE_PHANTOM", "MEMTRACE_PHANTOM_DYNAMIC", "MEMTRACE_RUN_ID", "MEMTRACE_HELLO"):
            environment.pop(name, None)
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
            environment.pop(name, None)
        # In a traced run, the traces are kept with the others; otherwise they are removed after the tests.
        kept = limits.is_active()
        out = Path(limits.trace_folder(), f"phantom-{card}") if kept else folder / "out"
        environment[restart.STARTED] = "1" if kept else restart.TEMPORARY
        environment.update(dict.fromkeys(_blocks.SPLITTING, "0"), MEMTRACE_COMPRESS="off")
        try:
            command = [_command.find(), "run", "--quiet", "--phantom", card, "--out", str(out), "--"]
        except _command.TraceError as error:
            return f"The simulated GPU {card} cannot be started: {error}"
        command += [sys.executable, "-m", "pytest", *self._arguments(), f"--rootdir={root}"]
        command += [f"{CHILD_OPTION}={folder / 'reports'}"]
        inner = subprocess.run(
            command,
            cwd=self._config.invocation_params.dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        last = "\n".join(inner.stdout.splitlines()[-LAST_LINES:])
        return (
            f"The process of this test on the simulated GPU {card} ended with status {inner.returncode} "
            f"and no report. The end of its output:\n\n{last}"
        )

    def _arguments(self) -> list[str]:
        """Returns the arguments of this pytest, without those that are for the outer pytest alone.

        The names of tests among them stay, because a value of an option may be the same word."""
        worker = getattr(self._config, "workerinput", None)
        words = worker["mainargv"][1:] if worker else list(self._config.invocation_params.args)
        words = restart.without_option(words)
        if self._config.pluginmanager.hasplugin("xdist"):
            words += ["-n0", "--dist=no"]
        return [*words, "--junitxml="]

    def _read(self, path: Path) -> list[pytest.TestReport]:
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        load = self._config.hook.pytest_report_from_serializable
        return [load(config=self._config, data=json.loads(line)) for line in lines]


def is_complete(reports: list[pytest.TestReport]) -> bool:
    """Returns True if the reports belong to a test that ran to its end."""
    return any(report.when == "teardown" for report in reports)


def split_nodeid(item: pytest.Item) -> tuple[str, str]:
    """Returns the file of a test, and the rest of its name."""
    path, separator, rest = item.nodeid.partition("::")
    return path, separator + rest


def failure(item: pytest.Item, why: str) -> pytest.TestReport:
    """Returns the report for a test whose process left no report."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=why,
        when="call",
    )
