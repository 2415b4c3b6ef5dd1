"""One rank of torchrun: allocates a block of a unique size on its own device, and communicates once."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))
import memtrace  # noqa: E402

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
kept = torch.empty(512 * (rank + 1), dtype=torch.uint8, device="cuda")
dist.all_reduce(kept[:512])
memtrace.mark("connected")
dist.destroy_process_group()
