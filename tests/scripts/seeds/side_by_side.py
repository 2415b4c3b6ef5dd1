"""Runs each program of `programs.py` by itself and under each of PyTorch's tools.

Each run is in a process of its own that shares the imports, and prints a line of JSON: the program, the tool,
the process and the tool's figures.

side_by_side.py [PROGRAM...]
"""

import contextlib
import io
import json
import os
import sys
import traceback

import torch
import torch.distributed  # noqa: F401  (imported once, for all)
from cpu_programs import PROGRAMS as CPU_PROGRAMS
from programs import PROGRAMS, STEPS
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.memory_tracker import MemoryTracker
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import MemoryProfileTimeline


def snapshot(devices):
    return {
        str(device): {str(getattr(key, "value", key)): value for key, value in types.items()}
        for device, types in devices.items()
    }


def alone(model, others, iteration):
    for _ in range(STEPS):
        iteration()
    return {}


def mem_tracker(model, others, iteration):
    tracker = MemTracker()
    tracker.track_external(model, *others)
    with tracker:
        for _ in range(STEPS):
            # Otherwise MemTracker takes a module's second iteration for a second call.
            tracker.reset_mod_stats()
            iteration()
        current = snapshot(tracker.get_tracker_snapshot("current"))
    modules = {
        stats.mod_fqn: {
            "parameters": stats.parameter_mem,
            "buffers": stats.buffer_mem,
            "states": {
                state.value: [snapshot(one) for one in calls] for state, calls in stats.snapshots.items()
            },
        }
        for stats in tracker.memory_tracking.values()
    }
    return {"peak": snapshot(tracker.get_tracker_snapshot("peak")), "current": current, "modules": modules}


def memory_tracker(model, others, iteration):
    tracker = MemoryTracker()
    tracker.start_monitor(model)
    for _ in range(STEPS):
        iteration()
    tracker.stop()
    summary = io.StringIO()
    with contextlib.redirect_stdout(summary):
        tracker.summary()
    allocated = [value for _, value in tracker.memories_allocated.values()]
    return {"summary": summary.getvalue().splitlines(), "peak": max(allocated), "ops": len(allocated)}


def profiler(model, others, iteration):
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, profile_memory=True, with_stack=True, record_shapes=True) as found:
        for _ in range(STEPS):
            iteration()
    timeline = found._memory_profile()
    plots = {}
    for device in sorted({str(key.device) for _, _, (key, _), _ in timeline.timeline}):
        _, sizes = MemoryProfileTimeline(timeline)._coalesce_timeline(device)
        plots[device] = [max(column) for column in zip(*sizes, strict=True)]
    peaks, now = {}, {}
    for _, action, (key, _), size in timeline.timeline:
        device = str(key.device)
        change = {"PREEXISTING": size, "CREATE": size, "DESTROY": -size}.get(action.name, 0)
        now[device] = now.get(device, 0) + change
        peaks[device] = max(peaks.get(device, 0), now[device])
    return {"peak": peaks, "plots": plots}


TOOLS = {each.__name__: each for each in (alone, mem_tracker, memory_tracker, profiler)}


def run(program, tool):
    torch.manual_seed(0)
    parts = (PROGRAMS | CPU_PROGRAMS)[program]()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    figures = TOOLS[tool](*parts)
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    figures["max_allocated"] = [torch.cuda.max_memory_allocated(device) for device in devices]
    return figures


def main():
    for program in sys.argv[1:] or PROGRAMS:
        for tool in TOOLS:
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                continue
            answer = {"program": program, "tool": tool, "pid": os.getpid()}
            try:
                answer |= run(program, tool)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
                traceback.print_exc()
            print(json.dumps(answer), flush=True)
            # End at once: FSDP's threads and NCCL's stand-ins need no orderly end.
            os._exit(0)


main()
