"""Defines the loop, its settings and the page that scripts/overhead and scripts/instructions share."""

from .built import ROOT
from .page_block import PageBlock

LOOP = ROOT / "benches" / "overhead_loop.py"
PAGE = ROOT / "docs" / "overhead.md"
CARD = "h100-80g"

UNTRACED = "untraced"

# For each setting: its label, the recorder of overhead_loop.py, whether memtrace traces the run, and the
# environment variables.
SETTINGS = [
    (UNTRACED, "none", False, {}),
    ("memtrace: `MEMTRACE_ENABLED=0`", "none", True, {"MEMTRACE_ENABLED": "0"}),
    ("memtrace: memory alone", "none", True, {"MEMTRACE_OPS": "off", "MEMTRACE_MODULES": "0"}),
    ("memtrace: between detailed steps", "none", True, {"MEMTRACE_DETAIL": "off"}),
    ("memtrace: memory and ops", "none", True, {"MEMTRACE_MODULES": "0"}),
    ("memtrace: memory, ops, modules and tags (default)", "none", True, {}),
    ("memtrace: default and Python stacks", "none", True, {"MEMTRACE_STACKS": "python"}),
    ("memtrace: default and `MEMTRACE_OPS=all`", "none", True, {"MEMTRACE_OPS": "all"}),
    ("memtrace: default and `MEMTRACE_OPS=io`", "none", True, {"MEMTRACE_OPS": "io"}),
    ("op callbacks that do nothing", "callbacks", False, {}),
    ("torch `_record_memory_history`", "history", False, {}),
    ("torch `_record_memory_history` with stacks", "history-stacks", False, {}),
    ("`torch.profiler(profile_memory=True)`", "profiler", False, {}),
    ("`torch.profiler` between the steps of its schedule", "profiler-between", False, {}),
]

# The settings of the loop on the CPU.
ON_CPU = [
    (UNTRACED, "none", False, {}),
    ("memtrace (default)", "none", True, {}),
    ("memtrace: default and `MEMTRACE_HOST_TENSORS=1`", "none", True, {"MEMTRACE_HOST_TENSORS": "1"}),
]

# The tools that memtrace was built after, each with the options that its own reports need.
TOOLS = [
    (UNTRACED, "none", False, {}),
    ("memtrace (default)", "none", True, {}),
    ("memtrace: default and `MEMTRACE_OPS=io`", "none", True, {"MEMTRACE_OPS": "io"}),
    ("`torch.profiler`, for its memory timeline", "profiler-timeline", False, {}),
    ("MemTracker", "mem-tracker", False, {}),
    ("MemoryTracker", "memory-tracker", False, {}),
]


def write(text, mark):
    """Replaces the text between the comments `<!-- mark -->` and `<!-- /mark -->` of docs/overhead.md."""
    PageBlock.named(PAGE, mark).write(f"\n{text}\n")
