"""Runs each model of `sharded_models.py` under PyTorch's FSDPMemTracker, and by itself.

By itself, the program has a mark `snapshot N` wherever FSDPMemTracker takes its snapshot N. A launcher starts
one rank of several. Each run is in a process of its own, and prints a line of JSON: the model, the number of
ranks, the tool, the process, the snapshots and the peak.

    sharded.py [MODEL...]
"""

import json
import os
import sys
import traceback

import torch
import torch.distributed as dist
from sharded_models import MODELS, STEPS
from torch.cuda import nvtx
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker


def plain(snapshot):
    """Returns the snapshot of the GPU."""
    types = next((types for device, types in snapshot.items() if device.type == "cuda"), {})
    return {getattr(key, "value", key): value for key, value in types.items()}


class Recorder(FSDPMemTracker):
    """Marks and keeps each snapshot that FSDPMemTracker takes."""

    def __init__(self, sees_ops, *arguments):
        super().__init__(*arguments)
        self.sees_ops = sees_ops
        self.taken = []
        self.numbers = {}

    def get_tracker_snapshot(self, type="current"):
        nvtx.mark(f"snapshot {len(self.taken)}")
        found = super().get_tracker_snapshot(type)
        self.numbers[id(found)] = len(self.taken)
        # Peaks change the snapshot later.
        self.taken.append({"types": plain(found), "kept": found})
        return found

    def name_snapshots(self):
        """Adds the module and its state to each snapshot of this iteration."""
        for stats in self.memory_tracking.values():
            for state, snapshots in stats.snapshots.items():
                for snapshot in snapshots:
                    number = self.numbers.get(id(snapshot))
                    if number is not None and not state.name.startswith("PEAK"):
                        self.taken[number]["of"] = f"{stats.mod_fqn}: {state.value}"

    def _update_peak_stats(self, *arguments):
        before = dict(self._peak_mem)
        super()._update_peak_stats(*arguments)
        if self._peak_mem != before:
            nvtx.mark("peak")

    def _update_and_maybe_create_winfos(self, *arguments, **options):
        # Without the mode that sees each op, the tracker knows no tensor.
        return super()._update_and_maybe_create_winfos(*arguments, **options) if self.sees_ops else set()

    def start_without_dispatch(self):
        """Installs the tracker's hooks, but not the mode that sees each op."""
        self._register_module_and_optimizer_hooks()
        self.get_tracker_snapshot()
        self._mod_tracker.__enter__()

    def answer(self):
        peak = plain(super().get_tracker_snapshot("peak"))
        return {"snapshots": [{**each, "kept": None} for each in self.taken], "peak": peak}


def run(name, tool):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", rank=rank, world_size=world, store=dist.HashStore())
    model, optimizer, inputs, iteration = MODELS[name]()
    tracker = Recorder(tool == "tracked", model, optimizer)
    tracker.track_inputs(inputs)
    torch.cuda.reset_peak_memory_stats()
    if tool == "alone":
        tracker.start_without_dispatch()
    else:
        tracker.__enter__()
    for _ in range(STEPS):
        # Otherwise the tracker takes a module's second iteration for a second call.
        tracker.reset_mod_stats()
        iteration()
        tracker.get_tracker_snapshot()
        tracker.name_snapshots()
    return tracker.answer() | {"max_allocated": torch.cuda.max_memory_allocated()}


def main():
    for name in sys.argv[1:] or MODELS:
        for tool in ("alone", "tracked"):
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                continue
            answer = {"model": name, "ranks": int(os.environ["WORLD_SIZE"]), "tool": tool, "pid": os.getpid()}
            try:
                answer |= run(name, tool)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
                traceback.print_exc()
            print(json.dumps(answer), flush=True)
            # End at once: FSDP's threads and NCCL's stand-ins need no orderly end.
            os._exit(0)


main()
