"""Implements the pytest plugin, which checks limits of memory and runs tests on a simulated GPU.

    @pytest.mark.limit_gpu_memory("2 GiB")    the test must not hold more GPU memory at once than this
    @pytest.mark.limit_gpu_leaks("1 MiB")     the test must not leave more GPU memory behind; 0 by default
    @pytest.mark.limit_host_memory("40 GiB")  the process must not have more host memory during the test
    @pytest.mark.phantom("h100-80g")          the test runs on this simulated GPU, in a process of its own

`pytest --memtrace` checks the limits of GPU memory on the GPU of this machine, `pytest --memtrace=h100-80g`
on a simulated GPU. Without the option, these limits are not checked, and a message at the end says so. Limits
of host memory are always checked. docs/pytest.md has the details.
"""

from __future__ import annotations

import argparse

import pytest

from . import _sizes
from ._pytest import host_limit, limits, phantom_tests, restart

MARKS = [
    f"{limits.MEMORY}(limit): fail if the test holds more GPU memory at once; pytest --memtrace checks it",
    f"{limits.LEAKS}(limit=0): fail if the test leaves more behind on the GPU; pytest --memtrace checks it",
    f"{host_limit.MEMORY}(limit): fail if the process has more memory of the host during the test",
    f"{phantom_tests.MARK}(card): run the test on this simulated GPU, in a process of its own",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memtrace", "GPU memory (memtrace)")
    group.addoption(
        restart.OPTION,
        nargs="?",
        const="",
        metavar="CARD",
        help="trace the GPU memory of the tests and check their limits; with =CARD, such as h100-80g, on a "
        "simulated GPU",
    )
    group.addoption(
        restart.OUT_OPTION,
        metavar="DIR",
        help="the folder of the traces [default: a new folder in memtrace-out]",
    )
    parser.addoption(phantom_tests.CHILD_OPTION, help=argparse.SUPPRESS)


# Runs before capturing begins, so that the process that replaces this one has the real stdout.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config):
    restart.restart_if_needed(early_config)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(host_limit.HostLimit(), "memtrace-host-limit")
    if limits.is_active():
        config.pluginmanager.register(limits.Limits(), "memtrace-limits")
        config.pluginmanager.register(Untraced(), "memtrace-untraced")
    # Registered last: of two hooks that are `tryfirst`, pytest calls the one registered last, and phantom
    # tests must be taken before `Limits` runs them.
    config.pluginmanager.register(phantom_tests.PhantomTests(config), "memtrace-phantom-tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Reads all marks even if the run is not traced, so that errors in them are reported.
    limited = 0
    for item in items:
        found = [limits.limit_of(item, name) for name in (limits.MEMORY, limits.LEAKS)]
        limited += phantom_tests.card_of(item) is None and any(limit is not None for limit in found)
    config.stash[UNCHECKED] = 0 if limits.is_active() else limited


UNCHECKED = pytest.StashKey[int]()


class Untraced:
    """Fails a traced run that has limits but allocated no GPU memory, because then no limit was checked."""

    def __init__(self) -> None:
        self._limited: set[str] = set()
        self._is_traced = False

    # With xdist, this receives the reports of all workers.
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if limits.MEMORY in report.keywords or limits.LEAKS in report.keywords:
            self._limited.add(report.nodeid)
        self._is_traced |= any(name == limits.PEAK_PROPERTY for name, _ in report.user_properties)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and self._limited and not self._is_traced:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            session.config.stash[UNTRACED] = len(self._limited)


UNTRACED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str | None:
    if not limits.is_active():
        return None
    return f"memtrace: {limits.gpu()}, traced into {limits.trace_folder()}"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    peaks = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", None) or []:
                if name == limits.PEAK_PROPERTY and value:
                    peaks[report.nodeid] = max(value, peaks.get(report.nodeid, 0))
    if peaks:
        terminalreporter.section("GPU memory")
        ordered = sorted(peaks.items(), key=lambda item: -item[1])
        for nodeid, peak in ordered[:5]:
            terminalreporter.write_line(f"{_sizes.show(peak):>12}  {nodeid}")
        if len(ordered) > 5:
            terminalreporter.write_line(f"{len(ordered) - 5} more tests used less")
        if limits.is_active():
            terminalreporter.write_line(f"traced into {limits.trace_folder()}")
    untraced = config.stash.get(UNTRACED, 0)
    if untraced:
        tests = "the limit of 1 test was" if untraced == 1 else f"the limits of {untraced} tests were"
        terminalreporter.section("GPU memory")
        terminalreporter.write_line(
            f"{tests} not checked, because this run allocated no GPU memory; is there a GPU? "
            "pytest --memtrace=h100-80g simulates one",
            red=True,
        )
    unchecked = config.stash.get(UNCHECKED, 0)
    if unchecked and not hasattr(config, "workerinput"):
        tests = "the limits of 1 test were" if unchecked == 1 else f"the limits of {unchecked} tests were"
        terminalreporter.section("GPU memory")
        terminalreporter.write_line(
            f"{tests} not checked, because this run is not traced; pytest --memtrace checks them on the GPU "
            "of this machine, pytest --memtrace=h100-80g on a simulated one"
        )
