"""Implements the marks `limit_gpu_memory` and `limit_gpu_leaks`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

import pytest

from .. import _blocks, _marks, _sizes
from . import child_traces, restart

MEMORY = "limit_gpu_memory"
LEAKS = "limit_gpu_leaks"
PEAK_PROPERTY = "gpu_memory_peak_bytes"


def limit_of(item: pytest.Item, name: str) -> int | None:
    """Returns the limit in a test's mark, in bytes, or None without the mark.

    Raises UsageError for an invalid mark."""
    mark = item.get_closest_marker(name)
    if mark is None:
        return None
    arguments = [*mark.args, *mark.kwargs.values()]
    if name == LEAKS and not arguments:
        return 0
    if len(arguments) != 1 or mark.kwargs.keys() - {"limit"}:
        raise pytest.UsageError(f"{item.nodeid}: {name} takes one size: @pytest.mark.{name}('2 GiB')")
    try:
        return _sizes.parse(arguments[0])
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: {name}: {error}") from error


class Limits:
    """Measures each test of a traced run, and fails the tests that exceed their limits."""

    def __init__(self) -> None:
        self._start: _blocks.Position | None = None
        self._others: list[tuple[_blocks.Position, _blocks.Position]] = []
        self._traces: frozenset[str] = frozenset()
        self._problem = "no test began"
        self._limited = False
        self._passed = False
        self._is_reporting = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._others, self._passed = [], False
        self._limited = any(item.get_closest_marker(name) for name in (MEMORY, LEAKS))
        if self._limited:
            clear_workspaces()
        self._traces = child_traces.names()
        try:
            self._start = _blocks.here()
        except _blocks.NotMeasured as error:
            self._start, self._problem = None, str(error)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        # The memory of a fixture that other tests share does not count for this test, because the result of a
        # limit must not depend on the order of tests.
        if fixturedef.scope == "function":
            return (yield)
        # The finalizers run in reverse order in the teardown of the fixture's last test: first
        # `_begin_other`, then the fixture's own teardown, then `_end_other`.
        begin: list[_blocks.Position] = []
        fixturedef.addfinalizer(lambda: self._end_other(begin))
        self._begin_other(begin)
        try:
            return (yield)
        finally:
            self._end_other(begin)
            fixturedef.addfinalizer(lambda: self._begin_other(begin))

    def _begin_other(self, begin: list[_blocks.Position]) -> None:
        """Records the position at which the memory of a shared fixture begins, in a test with a limit."""
        if self._start is not None and self._limited:
            with contextlib.suppress(_blocks.NotMeasured):
                begin.append(_blocks.here())

    def _end_other(self, begin: list[_blocks.Position]) -> None:
        if begin:
            clear_workspaces()
            with contextlib.suppress(_blocks.NotMeasured):
                self._others.append((begin.pop(), _blocks.here()))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self._check(item)
        self._passed = True
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        # Memory that the test's fixtures allocate during teardown also belongs to the test.
        if self._passed and limit_of(item, MEMORY) is not None:
            self._check(item)
        leaks = limit_of(item, LEAKS)
        # If another plugin runs this test, `pytest_runtest_protocol` below cannot change its report, so the
        # teardown fails instead.
        if leaks is not None and not self._is_reporting and (problem := self._leak(leaks)) is not None:
            pytest.fail(problem, pytrace=False)
        return result

    def _check(self, item: pytest.Item) -> None:
        """Fails the test if its memory so far exceeds its limit or is unknown."""
        limit = limit_of(item, MEMORY)
        try:
            use = self._use(self._limited or limit is not None)
        except _blocks.NotMeasured as error:
            if limit is not None:
                pytest.fail(f"the limit of GPU memory cannot be checked: {error}", pytrace=False)
            return
        if use.is_traced:
            others = [entry for entry in item.user_properties if entry[0] != PEAK_PROPERTY]
            item.user_properties[:] = [*others, (PEAK_PROPERTY, use.peak)]
        if limit is not None and use.peak > limit:
            pytest.fail(over_limit(use, limit), pytrace=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        limit = limit_of(item, LEAKS)
        if limit is None:
            return None
        from _pytest.runner import runtestprotocol

        # The reports are held back until the test's fixtures have ended, because the memory is checked then.
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._is_reporting = True
        try:
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        finally:
            self._is_reporting = False
        problem = self._leak(limit)
        for report in reports:
            if report.when == "call" and report.passed and problem is not None:
                report.outcome = "failed"
                report.longrepr = problem
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _leak(self, limit: int) -> str | None:
        """Returns the message about memory left behind by the last test, or None within the limit."""
        gc.collect()
        clear_workspaces()
        try:
            use = self._use(True)
        except _blocks.NotMeasured as error:
            return f"the limit of GPU memory left behind cannot be checked: {error}"
        return left_behind(use, limit) if use.left_bytes > limit else None

    def _use(self, is_limited: bool) -> _blocks.Use:
        if self._start is None:
            raise _blocks.NotMeasured(self._problem)
        end = _blocks.here()
        use = _blocks.use_between(self._start, end, self._others)
        if is_limited:
            child_traces.add_children(use, self._traces, end, self._others)
        return use


def clear_workspaces() -> None:
    """Frees the workspaces that PyTorch keeps for cuBLAS after their first use.

    Each test with a limit begins without them, so its memory does not depend on earlier tests. PyTorch's own
    test suite does the same before it looks for leaks (CudaMemoryLeakCheck in torch/testing)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()


def over_limit(use: _blocks.Use, limit: int) -> str:
    """Returns the message for a test that used more memory than its limit."""
    moment = [use.moment.phase, use.moment.module, use.moment.op]
    where = ", ".join(text for text in moment if text != "(none)")
    lines = [
        f"The test used {_sizes.show(use.peak)} of GPU memory, more than its limit of {_sizes.show(limit)} "
        f"({gpu(use.device)}).",
        f"At the peak{f' ({where})' if where else ''} its memory was held by:",
        "",
        *_blocks.table(use.at_peak, use.peak),
        *more(),
    ]
    return "\n".join(lines)


def left_behind(use: _blocks.Use, limit: int) -> str:
    """Returns the message for a test that left more memory behind than its limit."""
    return "\n".join(
        [
            f"The test left {_sizes.show(use.left_bytes)} of GPU memory behind, more than its limit of "
            f"{_sizes.show(limit)}.",
            "Memory that it allocated and that was still in use after its end, by owner:",
            "",
            *_blocks.table(use.left, use.left_bytes),
            *more(),
        ]
    )


def more() -> list[str]:
    """Returns the lines of a message that tell how to get the full trace."""
    if os.environ.get(restart.STARTED) == restart.TEMPORARY:
        return ["", f"pytest {restart.OPTION} keeps the trace of the tests."]
    return ["", f"The trace of all tests: memtrace report {trace_folder()}"]


def gpu(device: int | None = None) -> str:
    """Describes the GPU of this process."""
    card = os.environ.get("MEMTRACE_PHANTOM")
    kind = f"simulated GPU {card}" if card else "GPU"
    return kind if device is None else f"device {device}, {kind}"


def trace_folder() -> str:
    """Returns the path of the folder of traces, relative to the working folder if the folder is inside it."""
    folder = os.environ.get("MEMTRACE_OUT") or "memtrace-out"
    short = os.path.relpath(folder)
    return folder if short.startswith("..") else short


def is_active() -> bool:
    """Returns True if this process is traced, so that limits can be checked."""
    return _marks.is_traced()
