"""Reads the output of cargo test, for scripts/test.

test_log.py follow FILE   follows the output of tests until SIGTERM, and prints the seconds of each test
test_log.py slowest LOG   prints the tests that took longest, from the lines of `follow`
test_log.py totals LOG    prints the numbers of passed, failed and skipped tests
test_log.py failed LOG    prints a line for each failed test of `cargo test --no-fail-fast`

A line of `failed` has cargo's arguments for the test's binary, a tab, and the test's name, which is empty if
the binary ended without a list of failures.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

MOST = 20  # tests that `slowest` prints


def follow(file: Path) -> None:
    ends: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
    last, rest = time.monotonic(), ""
    with file.open(errors="replace") as output:
        while True:
            is_last = bool(ends)
            *lines, rest = (rest + output.read()).split("\n")
            for line in lines:
                now = time.monotonic()
                found = re.match(r"test (\S+).* (ok|FAILED)$", line)
                if found:
                    print(f"{now - last:8.1f} s {found[1]}")
                if found or line.startswith("running "):
                    last = now
            if is_last:
                return
            time.sleep(0.1)


def slowest(lines: list[str]) -> None:
    print("slowest tests:")
    timed = [line for line in lines if re.fullmatch(r" *[\d.]+ s \S+", line)]
    for line in sorted(timed, key=lambda line: float(line.split()[0]), reverse=True)[:MOST]:
        print(line)


def totals(lines: list[str]) -> None:
    results = [line.split() for line in lines if line.startswith("test result:")]
    # test result: ok. 1 passed; 0 failed; 2 ignored; ...
    passed, failed, skipped = (sum(int(words[at]) for words in results) for at in (3, 5, 7))
    print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")


def failed(lines: list[str]) -> None:
    names: list[str] = []
    is_listed = False
    for line in lines:
        if line == "failures:":
            # The second of the two lists has the names alone.
            names, is_listed = [], True
        elif is_listed and re.match(r"    \S", line):
            names.append(line[4:])
        elif line.startswith("test result:"):
            is_listed = False
        elif line.startswith("error: test failed, to rerun pass `"):
            binary = line.split("`")[1]
            for name in names or [""]:
                print(f"{binary}\t{name}")
            names = []


def main() -> None:
    what, file = sys.argv[1], Path(sys.argv[2])
    if what == "follow":
        follow(file)
    else:
        lines = file.read_text(errors="replace").split("\n")
        {"slowest": slowest, "totals": totals, "failed": failed}[what](lines)


if __name__ == "__main__":
    main()
