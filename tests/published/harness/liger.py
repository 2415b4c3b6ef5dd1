"""The way Liger-Kernel's benchmarks measure memory: benchmark/scripts/utils.py of its repository."""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import torch

from . import figure

# Ten repetitions; the median is published.
REPETITIONS = 10


def sweep(
    option: str,
    case: Callable[[int, argparse.Namespace], None],
    again: bool = True,
    configurations: int = 1,
    **defaults: int,
) -> None:
    """Calls `case` with each value of `--OPTION INTEGER...`, as the benchmarks do in one process.

    The tensors of a call are freed before the next call. Other integers of the case are options with
    defaults. With `again`, each call runs once before, because the benchmark of speed runs first with the
    same shapes: the blocks that the allocator cached then are split now. Each configuration runs all values.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{option}", type=int, nargs="+", required=True)
    parser.add_argument("--mode", default="full", choices=["full", "forward", "backward"])
    parser.add_argument("--variant", default="")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()

    def whole() -> None:
        for arguments.configuration in range(configurations):
            for value in getattr(arguments, option):
                case(value, arguments)

    if again:
        with contextlib.redirect_stdout(io.StringIO()):
            whole()
    whole()


def peak(function: Callable[[], object]) -> int:
    """Returns the median of `max_memory_allocated` over the repetitions."""
    peaks = []
    for _ in range(REPETITIONS):
        # Waits until the thread of the backward pass has released its last tensors. On a GPU it has done so
        # long ago, but kernels take no time here, and on a busy machine the thread can be late.
        time.sleep(0.02)
        torch.cuda.reset_peak_memory_stats()
        function()
        peaks.append(torch.cuda.max_memory_allocated())
    return int(statistics.median(peaks))


def workspaces() -> None:
    """Lets cuBLAS allocate its workspaces, one for each thread, as in a process that trained before."""
    weight = torch.zeros(16, 16, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()


def measure(label: str, forward: Callable[[], torch.Tensor], mode: str = "full") -> None:
    """Prints the peak of a forward pass, of a backward pass by a random gradient, or of both."""

    def full() -> None:
        result = forward()
        result.backward(torch.randn_like(result), retain_graph=True)

    if mode == "forward":
        workspaces()
        figure(label, allocated=peak(forward))
    elif mode == "backward":
        result = forward()
        gradient = torch.randn_like(result)
        figure(label, allocated=peak(lambda: result.backward(gradient, retain_graph=True)))
    else:
        figure(label, allocated=peak(full))


def loss(label: str, forward: Callable[[], torch.Tensor], retain: bool = False) -> None:
    """Prints the peak of a forward pass to a scalar and its backward pass."""

    def full() -> None:
        result = forward()
        result.backward(retain_graph=retain)

    figure(label, allocated=peak(full))


def backward_by(label: str, forward: Callable[[], torch.Tensor], gradient: torch.Tensor) -> None:
    """Prints the peak of a forward pass and of its backward pass by a given gradient."""

    def full() -> None:
        result = forward()
        result.backward(gradient, retain_graph=True)

    figure(label, allocated=peak(full))
