"""Ways to fill GPU 0 from the other ranks of a job, for scripts/growth-corpus. Each has a remedy.

    torchrun --nproc-per-node 3 tests/growth/crowded.py WAY [--remedy]

Each line that puts a rank on GPU 0 ends in the comment `# here`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["LOCAL_RANK"])
CHECKPOINT = Path(tempfile.gettempdir()) / f"crowded-{os.environ['MASTER_PORT']}.pt"


class Images(Dataset):
    """Images that a worker process moves to the GPU, unless they stay on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 64, 64), index, device=self.device).sum().cpu()  # here


def load(remedy: bool) -> None:
    """A checkpoint that rank 0 saved goes back to GPU 0. Remedy: map_location."""
    torch.cuda.set_device(RANK)
    if RANK == 0:
        torch.save({"weight": torch.zeros(16 << 20, device="cuda")}, CHECKPOINT)
    dist.barrier()
    kept.append(torch.load(CHECKPOINT, map_location="cpu" if remedy else None))  # here


def cuda(remedy: bool) -> None:
    """The model goes to the GPU before the rank has chosen one. Remedy: set_device first."""
    if remedy:
        torch.cuda.set_device(RANK)
    kept.append(nn.Linear(2048, 2048).cuda())  # here
    torch.cuda.set_device(RANK)


def mem_get_info(remedy: bool) -> None:
    """Each rank asks GPU 0 for its free memory. Remedy: its own GPU."""
    torch.cuda.mem_get_info(RANK if remedy else 0)  # here
    torch.cuda.set_device(RANK)


def empty_cache(remedy: bool) -> None:
    """Each rank empties its cache on GPU 0. Remedy: its own GPU."""
    torch.cuda.set_device(RANK)
    torch.zeros(1, device="cuda")
    with torch.cuda.device(RANK if remedy else 0):  # here
        torch.cuda.empty_cache()


def collective(remedy: bool) -> None:
    """An object is sent from the current GPU, which is GPU 0 for each rank. Remedy: set_device first, and the
    object on the CPU, because a thread of gloo uses GPU 0 for tensors of any GPU."""
    if remedy:
        torch.cuda.set_device(RANK)
    dist.broadcast_object_list([RANK], device=torch.device("cpu" if remedy else "cuda"))  # here
    torch.cuda.set_device(RANK)


def worker(remedy: bool) -> None:
    """Worker processes of a loader use CUDA, each on GPU 0. Remedy: tensors on the CPU."""
    torch.cuda.set_device(RANK)
    torch.zeros(64 << 20, device="cuda")
    images = Images("cpu" if remedy else "cuda")
    list(DataLoader(images, num_workers=1, multiprocessing_context="spawn"))


WAYS = [load, cuda, mem_get_info, empty_cache, collective, worker]
kept: list = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=[way.__name__ for way in WAYS])
    parser.add_argument("--remedy", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    next(way for way in WAYS if way.__name__ == args.way)(args.remedy)
    model = nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.zeros(512, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    if RANK == 0:
        CHECKPOINT.unlink(missing_ok=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
