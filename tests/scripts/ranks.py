"""What torchrun starts: each rank takes a block of its own size on its own device."""

import os

import torch

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
kept = torch.empty(512 * (rank + 1), dtype=torch.uint8, device="cuda")
