"""Prints torch's own peak of each device that the process used; each program ends with this."""

import os
import sys

import torch


def print_peak():
    """Prints the peak of each device on stderr, which the comparison of outputs leaves out.

    `scripts/programs` compares these peaks with the trace."""
    for device in range(torch.cuda.device_count()):
        peak = torch.cuda.memory_stats(device).get("allocated_bytes.all.peak", 0)
        if peak:
            print(f"PEAK {os.getpid()} {device} {peak}", file=sys.stderr, flush=True)
