"""Prints the state of Python, torch and the process after the first use of the GPU, and after ten steps.

A traced run must print the same lines as an untraced one.
"""

import ctypes
import gc
import hashlib
import locale
import os
import random
import signal
import sys
import threading
import time
import warnings

import torch
from torch import nn

# Variables that `memtrace run` and the test set.
NAMES_OF_MEMTRACE = (
    "MEMTRACE",
    "LD_PRELOAD",
    "NVTX_INJECTION64_PATH",
    "TRITON_LIBCUDA_PATH",
    "PATH",
    "OWNER_OUT",
    "_",
)

# Containers that memtrace freed before this point stay in Python's free lists, and the program's next ones
# come from there without a count. A full collection empties these lists (docs/how-it-works.md).
gc.collect()


def digest(value) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def sequence_number(on_thread: bool = False) -> int:
    """Returns the next sequence number of an autograd node in this or a new thread, which uses it up."""
    found = []

    def ask():
        found.append(torch.zeros(1, requires_grad=True).neg().grad_fn._sequence_nr())

    if on_thread:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    else:
        ask()
    return found[0]


def errno_after(work) -> int:
    place = ctypes.CDLL(None).__errno_location
    place.restype = ctypes.POINTER(ctypes.c_int)
    cell = place()
    cell[0] = 77
    work()
    return cell[0]


def version_tags() -> list:
    """Returns whether torch's classes kept the versions by which the interpreter caches their attributes."""
    kinds = (nn.Module, nn.Linear, torch.Tensor, nn.Parameter, torch.optim.Optimizer, torch.optim.Adam)
    # tp_version_tag of PyTypeObject; the value itself depends on the classes made before.
    return [ctypes.c_uint.from_address(id(kind) + 384).value != 0 for kind in kinds]


def is_id_used_again() -> bool:
    first = object()
    number = id(first)
    del first
    second = object()
    return id(second) == number


def state_of_collector() -> dict:
    return {
        # Leaves out the count of the youngest generation: it depends on which freed containers the
        # interpreter can reuse, and the tracer frees some, too.
        "gc counts": gc.get_count()[1:],
        "gc thresholds": gc.get_threshold(),
        "gc enabled": gc.isenabled(),
        "gc callbacks": len(gc.callbacks),
        "gc collections": [stats["collections"] for stats in gc.get_stats()],
        "gc garbage": len(gc.garbage),
        "gc frozen": gc.get_freeze_count(),
        "gc debug": gc.get_debug(),
    }


def state_of_python() -> dict:
    registries = [
        (name, sorted(map(repr, vars(module).get("__warningregistry__", {}))))
        for name, module in list(sys.modules.items())
        if hasattr(module, "__dict__") and "__warningregistry__" in vars(module)
    ]
    return {
        "modules": (len(sys.modules), digest(list(sys.modules))),
        "warnings filters": digest(warnings.filters),
        "warnings registries": digest(registries),
        "threads": [thread.name for thread in threading.enumerate()],
        "thread count": threading._dangling and len(threading._dangling),
        "flags": tuple(sys.flags),
        "path": [path for path in sys.path if not path.startswith("/tmp/")],
        "import hooks": (len(sys.meta_path), len(sys.path_hooks)),
        "tools": (sys.gettrace(), sys.getprofile()),
        "hooks": [
            getattr(sys, name) is getattr(sys, f"__{name}__")
            for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook")
        ],
        "intervals": (sys.getswitchinterval(), sys.getrecursionlimit()),
        "random": digest(random.getstate()),
        "version tags": version_tags(),
        "id used again": is_id_used_again(),
        "warn options": sys.warnoptions,
        "async hooks": sys.get_asyncgen_hooks(),
        "audit": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding],
        "references": [sys.getrefcount(nn.Module._call_impl), sys.getrefcount(torch.optim.Adam)],
    }


def state_of_process() -> dict:
    mask = os.umask(0)
    os.umask(mask)
    return {
        "signal mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "signal handlers": digest(
            [(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())]
        ),
        "pending signals": sorted(signal.sigpending()),
        "wakeup": signal.set_wakeup_fd(-1),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "locale": locale.setlocale(locale.LC_ALL),
        "environment": digest(
            sorted(item for item in os.environ.items() if not item[0].startswith(NAMES_OF_MEMTRACE))
        ),
        "variables": len([name for name in os.environ if not name.startswith(NAMES_OF_MEMTRACE)]),
        "time zone": time.tzname,
        "folder": os.getcwd(),
        "umask": mask,
        "nice": os.nice(0),
        "scheduler": (os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))),
        "allocation leaves errno": errno_after(lambda: torch.empty(1 << 20, device="cuda")),
        "rounding": ctypes.CDLL(None).fegetround() if hasattr(ctypes.CDLL(None), "fegetround") else 0,
    }


def state_of_torch() -> dict:
    module = torch.nn.modules.module
    optimizer = sys.modules["torch.optim.optimizer"]
    tables = sorted(name for name in vars(module) if name.startswith("_global_"))
    stats = torch.cuda.memory_stats()
    return {
        "sequence": sequence_number(),
        "sequence of a thread": sequence_number(on_thread=True),
        "generator": digest(torch.get_rng_state().tolist()),
        "generator of the GPU": torch.cuda.initial_seed() == torch.cuda.initial_seed(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "stacks": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "autocast": (torch.is_autocast_enabled(), torch.is_autocast_cache_enabled()),
        "types": (torch.get_default_dtype(), torch.get_default_device()),
        "precision": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        "warn always": torch.is_warn_always_enabled(),
        "cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
        ),
        "matmul": (torch.backends.cuda.matmul.allow_tf32, torch.backends.mkldnn.enabled),
        "global hooks": [
            (name, len(getattr(module, name))) for name in tables if hasattr(getattr(module, name), "__len__")
        ],
        "any hook": module._has_any_global_hook() if hasattr(module, "_has_any_global_hook") else None,
        "optimizer hooks": [
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
        ],
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "profiler": torch._C._autograd._profiler_enabled(),
        "names": [
            digest(sorted(vars(kind)))
            for kind in (nn.Module, torch.Tensor, torch.optim.Optimizer, torch.optim.Adam)
        ],
        "namespace": (len(vars(torch)), len(vars(torch.nn)), len(vars(torch.cuda)), len(vars(torch._C))),
        "device": (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream),
        "GPU memory": digest(sorted((key, value) for key, value in stats.items())),
        "peak": torch.cuda.max_memory_allocated(),
    }


def show(moment: str) -> None:
    # Reads the collector's state before the other states, because these create containers.
    collector = state_of_collector()
    for part in (collector, state_of_torch(), state_of_python(), state_of_process()):
        for name, value in part.items():
            print(f"{moment}: {name}: {value}", flush=True)


class Forces(nn.Module):
    """A double backward: the engine orders the nodes of the two graphs by their numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, positions):
        energy = self.second(torch.tanh(self.first(positions))).sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, forces


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    torch.cuda.init()
    torch.empty(1, device="cuda")
    # memtrace's Python is loaded by now. Its objects would count as new objects of the program, which has its
    # next full collection when a quarter of all objects are new.
    gc.collect()
    show("start")
    model = Forces().cuda()
    # Only the order of the nodes matters here: on a simulated GPU the results have no values.
    optimizer = torch.optim.Adam(model.parameters())
    order = []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    for _ in range(10):
        positions = torch.randn(32, 8).cuda().requires_grad_()
        energy, forces = model(positions)
        (energy + forces.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    del positions, energy, forces
    print("order of gradients:", digest(order), len(order))
    show("ten steps")


main()
