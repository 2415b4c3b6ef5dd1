"""What a process has on the device before its first tensor: the context, and NCCL after a barrier.

As the start of modded-nanogpt's train_gpt.py: one element with a gradient, then NCCL's process group.
"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def say(label):
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"label": label, "device": total - free}), flush=True)


def rank_of(rank, ranks, store):
    torch.cuda.set_device(rank)
    torch.empty(1, device="cuda", requires_grad=True).backward()
    if rank == 0:
        say("without NCCL")
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    dist.barrier(device_ids=[rank])
    if rank == 0:
        say(f"after a barrier, ranks={ranks}")
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    args = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, args=(args.ranks, f"{folder}/store"), nprocs=args.ranks)
