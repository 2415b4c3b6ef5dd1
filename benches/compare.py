"""Times `memtrace summary` and `peak --by module --apart` against pandas, polars and DuckDB on one trace.

    "$(scripts/env torch 2.11.0)" benches/compare.py MEMTRACE TRACE [ROUNDS]

Each tool runs in its own process: once to warm the page cache, then ROUNDS times (default 3). The fastest run
counts. Every tool must answer everything that memtrace prints:

- `summary`: the peaks of allocated, active, reserved and used memory with their rows; live memory by category
  at the peak; the memory at the end; events by name; failed calls, lost events and steps; the shares of
  memory without an owner.
- `peak`: live memory by module, in bytes and blocks, and the row of the peak.

The answers are compared with memtrace's `--json`; the first difference ends the benchmark. pandas runs with
its defaults. polars and DuckDB run in the fastest form found, which reads only the columns that the question
needs.

TRACE must come from `cargo bench --bench analysis -- generate FILE ROWS`: one GPU, with steps, without tags.
The programs for the other tools rely on this, and on rows that contain their own category.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = {
    "pandas, default": ["ask_pandas.py"],
    "polars, eager": ["ask_polars.py", "eager"],
    "polars, projected": ["ask_polars.py", "projected"],
    "DuckDB": ["ask_duckdb.py"],
}
SUMMARY = ["lost_events", "unattributed_share", "unattributed_share_ever"]
PEAK = ["peak", "live_bytes", "lost_events", "unattributed_share_ever"]
PROCESS = ["pinned_peak_bytes", "rows", "events", "failed_calls", "steps", "duration_ns", "complete"]
DEVICE = ["peak_allocated", "peak_active", "peak_reserved", "peak_used", "at_peak_by_category_bytes"]
DEVICE += ["at_end_allocated_bytes", "at_end_reserved_bytes"]


def figures(question, answer):
    """Returns the figures of memtrace's `--json` in the form that the other tools print."""
    # The rows say (none) for a missing owner; memtrace prints which owner is missing.
    lacking = {"(no category)", "(no module)"}
    column = lambda groups: {"(none)" if name in lacking else name: value for name, value in groups.items()}
    if question == "peak":
        groups = {
            group["key"]: {name: group[name] for name in ["bytes", "blocks"]} for group in answer["groups"]
        }
        return {name: answer[name] for name in PEAK} | {"groups": column(groups)}
    [process] = answer["processes"]
    [device] = process["devices"]
    places = [(SUMMARY, answer), (PROCESS, process), (DEVICE, device)]
    found = {name: place[name] for names, place in places for name in names}
    return found | {"at_peak_by_category_bytes": column(device["at_peak_by_category_bytes"])}


def differences(name, expected, found):
    """Returns each figure that differs, with its path."""
    if not (isinstance(expected, dict) and isinstance(found, dict)):
        return [] if expected == found else [f"{name}: memtrace says {expected}, not {found}"]
    keys = sorted(expected.keys() | found.keys())
    return [text for key in keys for text in differences(f"{name}/{key}", expected.get(key), found.get(key))]


def run(command):
    start = time.perf_counter()
    # Its messages go to the terminal: with a second pipe, a program with many messages would wait for ever.
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, json.loads(output)


def main():
    memtrace, trace, *rest = sys.argv[1:]
    rounds = int(rest[0]) if rest else 3
    programs = Path(__file__).parent / "compare"
    own = {"summary": ["summary"], "peak": ["peak", "--by", "module", "--apart"]}
    size = os.path.getsize(trace)
    print(f"{trace}: {size / 1e9:.2f} GB, {os.cpu_count()} cores, best of {rounds}\n")
    results = {}
    for question, words in own.items():
        ways = {"memtrace": [memtrace, *words, trace, "--json"]}
        for name, (program, *form) in PROGRAMS.items():
            ways[name] = [sys.executable, str(programs / program), *form, question, trace]
        print(f"{question:20} {'wall':>8} {'cpu':>8} {'memory':>10} {'of memtrace':>12}")
        expected = base = None
        for name, command in ways.items():
            runs = [run(command) for _ in range(rounds + 1)][1:]
            for *_, answer in runs:
                expected = expected or figures(question, answer)
                found = figures(question, answer) if name == "memtrace" else answer
                if wrong := differences(question, expected, found):
                    sys.exit(f"{name} has another answer:\n" + "\n".join(wrong))
            seconds, cpu, mib, _ = min(runs, key=lambda run: run[0])
            base = base or seconds
            results[f"{question}/{name}"] = {"seconds": seconds, "cpu_seconds": cpu, "mib": mib}
            print(f"{name:20} {seconds:7.2f}s {cpu:7.2f}s {mib:7.0f}MiB {seconds / base:11.1f}x", flush=True)
        print()
    if os.environ.get("JSON"):
        print(json.dumps(results))


if __name__ == "__main__":
    main()
