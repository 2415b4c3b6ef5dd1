"""One rank of a job; rank 0 keeps on the host what it gathers."""

import os
import time

import torch

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
share = torch.ones(1 << 20, device="cuda")
torch.distributed.all_reduce(share)
kept = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(8)] if rank == 0 else []
# Wait until memtrace has sampled the host.
time.sleep(1)
torch.cuda.synchronize()
torch.distributed.destroy_process_group()
