"""Compares MemTracker with memtrace on the CPU tensors of ../seeds/cpu_programs.py.

    cpu_tensors.py MEMTRACE TRACES ANSWERS

TRACES is the folder of a traced run of ../seeds/side_by_side.py with MEMTRACE_HOST_TENSORS=1 and
MEMTRACE_OPS=io, ANSWERS its output.

At each boundary of each module, each kind must be equal, except that MemTracker counts a gradient as `Temp`
until its hook has run. These other differences are accepted, each only as often as it is listed:

- ends: for memtrace, the backward of a module ends with the first row of another module. MemTracker's hook
  runs earlier, while the loss or a gradient of an activation is still there.
- pinned: MemTracker counts pinned tensors as `cpu`; memtrace counts them as `cpu (pinned)`.
"""

import collections
import json
import pathlib
import subprocess
import sys
from importlib.metadata import version

MEMTRACE, TRACES, ANSWERS = map(pathlib.Path, sys.argv[1:])
PROGRAMS = ("cpu_only", "two_gpus", "offloaded", "loader")
# The bytes of a pinned batch.
PINNED = {"loader": 128 * 1024 * 4 + 128 * 8}
# By program: the number of boundaries with the difference "ends".
ENDS = {"cpu_only": 2 if version("torch").startswith("2.6.") else 4}


def answer(*arguments):
    command = [MEMTRACE, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)
    return json.loads(done.stdout)["processes"][0]


def trace_of(found):
    (trace,) = [path for path in TRACES.iterdir() if path.name.endswith(f".{found['pid']}.csv")]
    return trace


def peak_of(trace):
    """Returns the peak of CPU tensors, from the first step on, because MemTracker starts there."""
    (device,) = answer("summary", "--device", "cpu", "--step", "0:", trace)["devices"]
    return device["peak_allocated"]["bytes"]


def compare_peaks(program, tools):
    theirs = tools["mem_tracker"]["peak"]["cpu"]["Total"]
    for tool in ("alone", "mem_tracker"):
        mine = peak_of(trace_of(tools[tool]))
        # Adam's counts of steps have 4 bytes each, and some live only inside an op.
        assert abs(mine + PINNED.get(program, 0) - theirs) <= 64, (program, tool, mine, theirs)


def compare_boundaries(program, found):
    options = ("--rounded", "--op-boundary", "--depth", 9)
    modules = answer("modules", *options, trace_of(found))["modules"]
    ours = {module["module"]: module for module in modules}
    reasons = collections.Counter()
    for name, module in found["modules"].items():
        for state, calls in module["states"].items():
            mine = ours[name]["states"][state]
            # MemTracker keeps only the last iteration.
            assert len(mine) >= len(calls) > 0, (program, name, state)
            for my_call, call in zip(mine[-len(calls) :], calls, strict=True):
                reasons[compare_call((program, name, state), my_call["cpu"], call["cpu"])] += 1
    equal = reasons.pop("")
    assert reasons == collections.Counter(ends=ENDS.get(program, 0)), (program, reasons)
    return equal


def compare_call(where, ours, theirs):
    """Returns the reason of a difference, or an empty text."""
    program, _, state = where
    assert (program in PINNED) == ("Activation" in theirs and theirs["Activation"] == PINNED.get(program))
    pinned = PINNED.get(program, 0)
    total = theirs["Total"] - pinned
    if ours["Total"] != total:
        assert "Backward" in state and abs(ours["Total"] - total) <= 4096, (*where, ours, theirs)
        return "ends"
    for kind in ("Parameter", "Buffer", "Optstate", "Other"):
        assert ours[kind] == theirs[kind], (*where, kind, ours, theirs)
    assert ours["Activation"] == theirs["Activation"] - pinned, (*where, ours, theirs)
    assert ours["Gradient"] >= theirs["Gradient"], (*where, ours, theirs)
    return ""


def main():
    programs = collections.defaultdict(dict)
    for line in ANSWERS.read_text().splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            assert "error" not in found, found
            programs[found["program"]][found["tool"]] = found
    assert tuple(programs) == PROGRAMS, list(programs)
    for program, tools in programs.items():
        compare_peaks(program, tools)
        print(program, "equal boundaries:", compare_boundaries(program, tools["mem_tracker"]))


main()
