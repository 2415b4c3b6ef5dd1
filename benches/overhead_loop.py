"""Trains a small GPT, and prints the wall time and the CPU time of each step in seconds. scripts/overhead
runs this program, and scripts/instructions runs it under callgrind.

    overhead_loop.py RECORDER STEPS PACE [DEVICE]

RECORDER is none, history, history-stacks, profiler, profiler-between (a profiler whose schedule records no
step), profiler-timeline (what its memory timeline needs), mem-tracker, memory-tracker, memory-tracing or
callbacks. `callbacks` registers op callbacks that do nothing: the cost that torch itself adds for every tool
that observes ops. After each step, PACE matrix products run on the CPU, in place of data loading and logging.
On the DEVICE cpu, the GPT is smaller, so that its ops take little of the count.
"""

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT


class Callback(ctypes.Structure):
    """The layout of at::RecordFunctionCallback in ATen/record_function.h."""

    _fields_ = [
        ("start", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("probability", ctypes.c_double),
        ("scopes", ctypes.c_uint8 * 10),
        ("needs", ctypes.c_uint8 * 3),
    ]


def machine_code(text):
    """Returns an executable mapping of this code, and its address. Keep it while the code may run."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(text)
    return code, ctypes.addressof(ctypes.c_char.from_buffer(code))


def callgrind(request):
    """Asks callgrind to start (4) or stop (5) counting: CALLGRIND_START_INSTRUMENTATION of callgrind.h.

    Outside callgrind the code is a no-op: the four rotations of rdi add up to 128 bits, and rbx is exchanged
    with itself. The sleep lets memtrace's writer take the events of the earlier steps.
    """
    time.sleep(2)
    # mov rax, rdi; the rotations by 3, 13, 61 and 51; xchg rbx, rbx; ret
    code, at = machine_code(bytes.fromhex("4889f848c1c70348c1c70d48c1c73d48c1c7334887dbc3"))
    arguments = (ctypes.c_uint64 * 6)((ord("C") << 24 | ord("T") << 16) + request)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at)(ctypes.addressof(arguments))
    return code


def listen():
    """Registers callbacks that do nothing, for memtrace's ops, backward functions and user ranges."""
    # mov qword ptr [rdi], 0; mov rax, rdi; ret: the start returns no state. The end is a single ret.
    start = bytes.fromhex("48c707000000004889f8c3")
    code, at = machine_code(start + bytes.fromhex("c3"))
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    add = library._ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE
    add.argtypes, add.restype = [Callback], ctypes.c_uint64
    for scope in (0, 1, 7):
        scopes = (ctypes.c_uint8 * 10)(*(index == scope for index in range(10)))
        add(Callback(at, at + len(start), 1.0, scopes))
    return code


recorder, steps, pace = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
device = sys.argv[4] if len(sys.argv) > 4 else "cuda"
WARM_UP = 3
RECORDERS = [
    *("none", "history", "history-stacks", "profiler", "profiler-between", "profiler-timeline"),
    *("mem-tracker", "memory-tracker", "memory-tracing", "callbacks"),
]
if recorder not in RECORDERS:
    sys.exit(f"overhead_loop: no recorder is called {recorder}; there are {', '.join(RECORDERS)}")

torch.manual_seed(0)
torch.set_num_threads(1)
SIZES = {
    "cuda": {"vocabulary": 8192, "context": 256, "width": 256},
    "cpu": {"vocabulary": 64, "context": 8, "width": 16},
}[device]
with torch.device(device):
    model = GPT(**SIZES, heads=4, layers=6)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
tokens = torch.randint(SIZES["vocabulary"], (4, SIZES["context"])).to(device)

if recorder.startswith("history"):
    stacks = {"context": "all", "stacks": "python"} if recorder == "history-stacks" else {"context": None}
    torch.cuda.memory._record_memory_history(max_entries=10_000_000, **stacks)
profiler = None
if recorder.startswith("profiler"):
    activities = [torch.profiler.ProfilerActivity.CPU]
    between = recorder == "profiler-between"
    schedule = torch.profiler.schedule(wait=1_000_000, warmup=1, active=1) if between else None
    timeline = recorder == "profiler-timeline"
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        profile_memory=True,
        with_stack=timeline,
        record_shapes=timeline,
    )
    profiler.start()
tracker = None
if recorder == "mem-tracker":
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer, tokens)
    tracker.__enter__()
if recorder == "memory-tracker":
    from torch.distributed._tools.memory_tracker import MemoryTracker

    MemoryTracker().start_monitor(model)
if recorder == "memory-tracing":
    from memory_profiler import MemoryTracer

    MemoryTracer(device="cuda").__enter__()

# Keeps the mapping of the callbacks' code as long as torch may call it.
code = listen() if recorder == "callbacks" else None

operand = torch.ones(512, 512)
seconds, cpu = [], []
counted = os.environ.get("OVERHEAD_LOOP_COUNTED") == "1"
for step in range(WARM_UP + steps):
    if counted and step == WARM_UP:
        started_counting = callgrind(4)
    if tracker:
        # Otherwise MemTracker takes the next forward for a second call of each module.
        tracker.reset_mod_stats()
    started, cpu_started = time.perf_counter(), time.process_time()
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if recorder == "profiler-between":
        profiler.step()
    for _ in range(pace):
        operand @ operand
    seconds.append(time.perf_counter() - started)
    cpu.append(time.process_time() - cpu_started)
if counted:
    stopped_counting = callgrind(5)
if profiler:
    profiler.stop()
blocks = torch.cuda.memory_stats()["allocation.all.allocated"] if device == "cuda" else 0
print("seconds", *seconds[WARM_UP:])
print("cpu", *cpu[WARM_UP:])
print("blocks", blocks)
