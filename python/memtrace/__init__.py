"""Marks the GPU memory of a PyTorch program, and reads the traces that memtrace writes.

Marks name the memory of a script while it runs, and do nothing if the script is not traced:

    for number, batch in enumerate(loader):
        memtrace.step(number)
        with memtrace.phase("forward"):
            loss = model(batch)

These functions read a trace that `memtrace run -o out -- python train.py` wrote:

    memtrace.read("out")                       # the rows, as a DataFrame
    memtrace.peak("out", by="module").table()  # a report's answer
    memtrace.report("out")                     # the page, in a notebook

The package itself needs nothing but Python; DataFrames need polars, or pandas and pyarrow.
"""

from typing import Any as _Any

from ._command import TraceError
from ._estimate import Estimate, estimate
from ._marks import (
    detail,
    flush,
    is_paused,
    is_traced,
    mark,
    module,
    op,
    pause,
    paused,
    phase,
    range,
    resume,
    retained,
    step,
    track_external,
)
from ._page import Page, report
from ._read import read
from ._reports import (
    Answer,
    advise,
    budget,
    check,
    diff,
    frag,
    leaks,
    ledger,
    modules,
    oom,
    ops,
    peak,
    ranks,
    serving,
    summary,
    timeline,
)

__all__ = [
    "Answer",
    "Estimate",
    "Page",
    "TraceError",
    "advise",
    "budget",
    "check",
    "detail",
    "diff",
    "estimate",
    "flush",
    "frag",
    "is_paused",
    "is_traced",
    "leaks",
    "ledger",
    "mark",
    "module",
    "modules",
    "oom",
    "op",
    "ops",
    "pause",
    "paused",
    "peak",
    "phase",
    "range",
    "ranks",
    "read",
    "report",
    "resume",
    "retained",
    "serving",
    "step",
    "summary",
    "timeline",
    "track_external",
]


def load_ipython_extension(ipython: _Any) -> None:
    """Adds the magics `%memtrace` and `%%memtrace`. IPython calls this function for `%load_ext memtrace`."""
    from ._magics import register

    register(ipython)
