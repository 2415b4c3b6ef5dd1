"""Connects memtrace to training frameworks, with the modules `transformers` and `lightning`.

They mark evaluation and saving (and, in `transformers`, generation) as phases, and add the peaks of GPU
memory to the trainer's own log. They do nothing if the process is not traced.
"""

from __future__ import annotations

__all__ = ["peaks"]


def peaks() -> dict[str, float]:
    """Returns PyTorch's peaks of this process's GPU memory in MiB. Empty before the process uses the GPU."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    names = {
        "gpu_peak_allocated_mib": "allocated_bytes.all.peak",
        "gpu_peak_reserved_mib": "reserved_bytes.all.peak",
    }
    return {name: round(stats.get(key, 0) / 2**20, 2) for name, key in names.items()}
