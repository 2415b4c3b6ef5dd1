"""Implements the mark `limit_host_memory`: the maximum host memory that the process
may have during a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .. import _marks, _sizes
from .limits import limit_of

MEMORY = "limit_host_memory"
TEST = "test: "
PEAK_PROPERTY = "host_memory_peak_bytes"
STATUS = Path("/proc/self/status")
KINDS = {"RssAnon": "without a file", "RssFile": "of mapped files", "RssShmem": "shared"}


def status() -> dict[str, int]:
    """Returns the sizes in /proc/self/status, in bytes; empty if there is no such file."""
    try:
        lines = [line.split() for line in STATUS.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}


def forget_peak() -> bool:
    """Makes the kernel reset the peak of resident memory. Returns False if the kernel
    does not support this."""
    try:
        # proc_pid_clear_refs(5): 5 resets VmHWM.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class HostLimit:
    """Fails each test during which the process had more host memory than the limit."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Without the mark, the peak of the process stays as it is, because others may read it.
        self._before: dict[str, int] | None = None
        if item.get_closest_marker(MEMORY) is not None:
            self._is_new, self._before = forget_peak(), status()
        # `memtrace budget` and `oom` name the running test, also after a kill.
        _marks.mark(TEST + item.nodeid)
        try:
            return (yield)
        finally:
            _marks.mark(TEST)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        limit = limit_of(item, MEMORY)
        if limit is not None:
            self._check(item, limit)
        return result

    def _check(self, item: pytest.Item, limit: int) -> None:
        if self._before is None:
            pytest.fail(
                f"the limit of host memory cannot be checked: the mark {MEMORY} was added after the test had "
                "begun; put it on the test",
                pytrace=False,
            )
        after = status()
        peak = after.get("VmHWM")
        if peak is None:
            pytest.fail(
                "the limit of host memory cannot be checked: /proc/self/status has no peak", pytrace=False
            )
        rose = peak > self._before.get("VmHWM", peak)
        if peak > limit and not self._is_new and not rose:
            pytest.fail(
                "the limit of host memory cannot be checked: the kernel cannot reset the peak, which was "
                "higher before the test",
                pytrace=False,
            )
        item.user_properties.append((PEAK_PROPERTY, peak))
        if peak > limit:
            pytest.fail(over_limit(peak, limit, self._before, after), pytrace=False)


def over_limit(peak: int, limit: int, before: dict[str, int], after: dict[str, int]) -> str:
    """Returns the message for a test during which the process exceeded the limit."""
    added = max(peak - before.get("VmRSS", 0), 0)
    lines = [
        f"The process had {_sizes.show(peak)} of host memory (resident) in this test, more than its limit "
        f"of {_sizes.show(limit)}.",
        f"Before the test it had {_sizes.show(before.get('VmRSS', 0))}; the test took {_sizes.show(added)} "
        f"more at its peak, and {_sizes.show(after.get('VmRSS', 0))} are resident after it:",
        *(f"  {_sizes.show(after[name])} {about}" for name, about in KINDS.items() if name in after),
    ]
    return "\n".join(lines)
