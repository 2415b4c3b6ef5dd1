"""Compares PyTorch's own tools with memtrace on the programs of ../seeds/programs.py, and checks that
docs/coming-from.md shows the results.

    side_by_side.py MEMTRACE TRACES ANSWERS PAGE

TRACES is the folder of a traced run of ../seeds/side_by_side.py with MEMTRACE_OPS=io, ANSWERS its output.
With MEMTRACE_BLESS=1 the page is written anew.

These differences are accepted, each only where it is named:

- workspaces: MemTracker sees what an op returns, but no workspace of a library.
- sampling: MemoryTracker reads one device, at the ends of ops; memtrace sees each block.
- gradients: MemTracker counts a gradient as `Temp` until its hook has run; memtrace counts it from its birth.
- nested: MemTracker's peak includes a copy that an op makes inside another op only after that other op.
- ends: for memtrace, the backward of a module ends with the first row of another module. MemTracker's hook
  runs earlier, while the loss and the first gradient are still there, or before a hook of the program.
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

MEMTRACE, TRACES, ANSWERS, PAGE = map(pathlib.Path, sys.argv[1:])
KINDS = ("Parameter", "Buffer", "Gradient", "Activation", "Temp", "Optstate")
# The kinds that only FSDPMemTracker has.
FSDP_KINDS = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter")
TOOLS = ("memtrace", "MemTracker", "MemoryTracker", "profiler")
# The programs that MemTracker refuses: they call a module twice, or call it after the backward of another
# model.
REFUSED = {"gan", "generation"}
# By program: how many entries of MemoryTracker's list have another name in memtrace, which does not know the
# parent of a module before that parent is called.
OTHER_NAMES = {"gan": 1}
# The programs in which the current device, which MemoryTracker reads, alternates during a backward of two
# devices.
CURRENT_DEVICES = {"two_gpus"}
# By program and reason: the number of boundaries at which the sums of MemTracker's kinds differ.
OTHER_SUMS = {
    "cnn": {"ends": 3},
    "amp": {"ends": 2},
    "hooked": {"ends": 3},
    "fsdp2": {"ends": 8, "hooks": 3},
    "two_gpus": {"ends": 2},
    "raw": {},
    "shared": {"ends": 3, "nested": 4},
}
# The programs whose categories differ: under MemTracker's dispatch mode, memtrace counts parameters that
# FSDP2 gathers as activations.
OTHER_KINDS = {"fsdp2"}

# The categories of the profiler's timeline, in its order; the first column is always 0.
PLOTTED = (
    "",
    "PARAMETER",
    "OPTIMIZER_STATE",
    "INPUT",
    "TEMPORARY",
    "ACTIVATION",
    "GRADIENT",
    "AUTOGRAD_DETAIL",
    "Unknown",
)
# By program: the categories whose highest points differ. In all, memtrace knows memory that is `Unknown` to
# the profiler, such as what an op allocated inside another op. In `generation` the profiler takes the results
# of one call for the inputs of the next. In `fsdp2` it does not see through DTensor, in `raw` the parameter
# that was replaced, in `two_gpus` the copies between devices.
UNKNOWN_TO_PROFILER = {"TEMPORARY", "Unknown"}
OTHER_PLOTS = {
    "generation": {"INPUT", "ACTIVATION"},
    "fsdp2": {"PARAMETER", "OPTIMIZER_STATE", "INPUT", "GRADIENT", "AUTOGRAD_DETAIL"},
    "raw": {"PARAMETER", "OPTIMIZER_STATE", "INPUT", "ACTIVATION", "GRADIENT", "AUTOGRAD_DETAIL"},
    "two_gpus": {"PARAMETER", "INPUT", "ACTIVATION"},
}


def run(*arguments):
    done = subprocess.run([MEMTRACE, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def answer(command, trace, *more):
    return json.loads(run(*command.split(), *more, "--json", trace))["processes"][0]


def trace_of(pid):
    (found,) = [path for path in TRACES.iterdir() if path.name.endswith(f".{pid}.csv")]
    return found


def peaks(trace):
    """Returns the peak of allocated memory of each device."""
    devices = answer("summary", trace)["devices"]
    return {f"cuda:{device['device']}": device["peak_allocated"]["bytes"] for device in devices}


def compare_list(program, trace, theirs):
    """Compares MemoryTracker's list entry by entry, for the device that it reads."""
    if program in CURRENT_DEVICES:
        return
    lines = [
        line for line in run("ops", "--legacy", "--device", 0, trace).splitlines() if line.endswith("MB")
    ]
    wanted = [line for line in theirs["summary"] if line.endswith("MB")]
    different = [pair for pair in zip(lines, wanted, strict=True) if pair[0] != pair[1]]
    assert len(different) == OTHER_NAMES.get(program, 0), (program, different)
    # Entries with different names must still have the same bytes.
    assert [line.split()[-1] for line in lines] == [line.split()[-1] for line in wanted], program
    assert len(lines) == 20, (program, lines)


def why(program, state, ours, theirs):
    """Returns the reason of a difference: `""` if the sums are equal, `?` if nothing explains it."""
    sums = [sum(kinds.get(kind, 0) for kind in KINDS + FSDP_KINDS) for kinds in (ours, theirs)]
    if sums[0] == sums[1]:
        return ""
    if state in ("Pre-Backward", "Post-Backward"):
        return "ends"
    # Between the moments at which the two tools end a call, FSDP2's hooks gather and free parameters.
    if program == "fsdp2":
        return "hooks"
    # MemTracker's dispatch mode does not see the block of an op inside another op.
    return "nested" if state == "Peak-Backward" and sums[0] > sums[1] else "?"


def compare_modules(program, trace, theirs):
    """Compares MemTracker's memory at each boundary of each module on the GPUs, and each module's size."""
    options = ("--rounded", "--op-boundary", "--depth", 9)
    ours = {module["module"]: module for module in answer("modules", trace, *options)["modules"]}
    reasons, boundaries = collections.Counter(), 0
    for name, module in theirs["modules"].items():
        # Removes the prefix that FSDP2 puts before the name of the model's class.
        mine = ours[name.removeprefix("FSDP")]
        for state, calls in module["states"].items():
            # Compares only the last calls, because MemTracker keeps only the last iteration.
            found = mine["states"][state]
            assert len(found) >= len(calls), (program, name, state, len(found))
            for my_call, call in zip(found[-len(calls) :], calls, strict=True):
                for device, kinds in call.items():
                    if device == "cpu":
                        continue
                    boundaries += 1
                    reason = why(program, state, my_call[device], kinds)
                    assert reason != "?", (program, name, state, my_call[device], kinds)
                    reasons[reason] += 1
                    if not reason and program not in OTHER_KINDS:
                        compare_kinds((program, name, state), my_call[device], kinds)
        if program not in OTHER_KINDS:
            sizes = [mine["parameter_bytes"], mine["buffer_bytes"]]
            on_gpu = not any("cpu" in call for calls in module["states"].values() for call in calls)
            assert not on_gpu or sizes == [module["parameters"], module["buffers"]], (program, name, sizes)
    equal = reasons.pop("", 0)
    assert dict(reasons) == OTHER_SUMS[program], (program, dict(reasons), boundaries)
    return equal, boundaries


def compare_kinds(where, ours, theirs):
    """Checks that each kind is equal; MemTracker may count a gradient as a temporary."""
    for kind in ("Parameter", "Buffer", "Activation", "Optstate"):
        assert ours.get(kind, 0) == theirs[kind], (*where, kind, ours, theirs)
    assert ours["Gradient"] >= theirs["Gradient"], (*where, ours, theirs)


def compare():
    """Compares all tools. Returns the rows of the table of peaks."""
    programs = {}
    for line in ANSWERS.read_text().splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            programs.setdefault(found["program"], {})[found["tool"]] = found
    assert len(programs) >= 8, list(programs)
    rows = []
    for program, tools in programs.items():
        alone, memory = tools["alone"], tools["memory_tracker"]
        mine = peaks(trace_of(alone["pid"]))
        truth = {f"cuda:{index}": size for index, size in enumerate(alone["max_allocated"]) if size}
        assert mine == truth, (program, mine, truth)
        refused = "error" in tools["mem_tracker"]
        assert refused == (program in REFUSED), (program, tools["mem_tracker"])
        tracked, states = {}, "refused"
        if not refused:
            tracked = {device: kinds["Total"] for device, kinds in tools["mem_tracker"]["peak"].items()}
            trace = trace_of(tools["mem_tracker"]["pid"])
            equal, boundaries = compare_modules(program, trace, tools["mem_tracker"])
            states = f"{equal} of {boundaries}" if boundaries else "no module"
        compare_list(program, trace_of(memory["pid"]), memory)
        compare_plots(program, trace_of(tools["profiler"]["pid"]), tools["profiler"]["plots"])
        for device, size in truth.items():
            assert tracked.get(device, 0) <= size, (program, device)
            profiled = tools["profiler"]["peak"][device]
            # The profiler's peak may be lower, because it counts requested sizes instead of block sizes.
            assert size - 64 * 1024 <= profiled <= size, (program, device, profiled, size)
            legacy = round(memory["peak"] * 2**20) if device == "cuda:0" else None
            assert legacy is None or legacy <= size
            figures = [size, size, tracked.get(device), legacy, profiled]
            where = program if len(truth) == 1 else f"{program}, {device}"
            rows.append((where, figures, states))
    return rows, programs


def compare_plots(program, trace, plots):
    """Compares the highest point of each category in the profiler's timeline with memtrace's export of it."""
    for device in plots:
        if not device.startswith("cuda"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            plot = pathlib.Path(folder) / "timeline.json"
            run("export", "--to", "timeline", "--device", device.removeprefix("cuda:"), "-o", plot, trace)
            _, sizes = json.loads(plot.read_text())
        ours = dict(zip(PLOTTED, (max(column) for column in zip(*sizes, strict=True)), strict=True))
        theirs = dict(zip(PLOTTED, plots[device], strict=True))
        # The profiler counts requested sizes.
        different = {kind for kind in PLOTTED if abs(ours[kind] - theirs[kind]) > 64 * 1024}
        accepted = UNKNOWN_TO_PROFILER | OTHER_PLOTS.get(program, set())
        assert different <= accepted, (program, device, ours, theirs)
        assert ours["Unknown"] <= theirs["Unknown"] + 64 * 1024, (program, device, ours, theirs)


def share(figure, truth):
    if figure is None:
        return "-"
    return f"{figure:,}" + ("" if figure == truth else f" ({100 * figure / truth - 100:.1f} %)")


def table_of(rows):
    lines = ["| program | torch | memtrace | MemTracker | MemoryTracker | profiler | equal boundaries |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name, figures, states in rows:
        cells = [f"{figures[0]:,}"] + [share(figure, figures[0]) for figure in figures[1:]]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {states} |")
    return "\n".join(lines)


def masked(text):
    """Returns the lines of a text without what differs between runs: times, and the widths of columns."""
    text = re.sub(r"\d+\.\d+ (ms|s|µs)\b", "T", text)
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines()]


def outputs_of(block, trace):
    """Returns a console block with its command's current output. A line `...` stands for lines left out."""
    command, *kept = block.splitlines()
    return "\n".join([command, *shown(kept, command, trace)]) + "\n"


def shown(kept, command, trace):
    """Runs a command and returns its output for the page, without header and notes.

    `kept` is the output on the page. If it contains `...`, the new output is cut after the same number of
    lines. If the two differ only in times, returns `kept`.
    """
    words = command.removeprefix("$ memtrace ").split()
    out = run(*[str(trace) if word == "out" else word.strip("'\"") for word in words]).splitlines()
    body = [line for line in out if not line.startswith(("python ", "note: ", "next: "))]
    while body and not body[0].strip():
        body.pop(0)
    body = [line for line in body if not line.endswith("of all bytes allocated")]
    limit = kept.index("...") if "..." in kept else None
    wanted = body if limit is None else [*body[: max(limit, 1)], "..."]
    while wanted and not wanted[-1].strip():
        wanted.pop()
    return kept if masked("\n".join(kept)) == masked("\n".join(wanted)) else wanted


def hold(rows, programs):
    page = PAGE.read_text()
    trace = trace_of(programs["cnn"]["alone"]["pid"])
    new = re.sub(
        r"(<!-- peaks -->\n).*?(<!-- /peaks -->)",
        lambda m: m[1] + table_of(rows) + "\n" + m[2],
        page,
        flags=re.S,
    )
    new = re.sub(
        r"(```console\n)(.*?)(```)", lambda m: m[1] + outputs_of(m[2], trace) + m[3], new, flags=re.S
    )
    if os.environ.get("MEMTRACE_BLESS") == "1":
        PAGE.write_text(new)
    assert new == page or os.environ.get("MEMTRACE_BLESS") == "1", f"MEMTRACE_BLESS=1 writes {PAGE}:\n{new}"


hold(*compare())
