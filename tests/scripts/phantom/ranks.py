"""Trains data-parallel over several processes with the simulated NCCL: torchrun --nproc-per-node N ranks.py

Each rank prints its memory. No rank waits for the device of another one.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
WIDTH, LAYERS = 512, 4


def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))).cuda()


def train(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == 0.0
    return optimizer


def collectives():
    device = "cuda"
    ones = torch.ones(10, device=device)
    dist.all_reduce(ones)
    dist.broadcast(ones, 0)
    dist.reduce(ones, 0)
    parts = [torch.empty(10, device=device) for _ in range(world)]
    dist.all_gather(parts, ones)
    whole = torch.empty(10 * world, device=device)
    dist.all_gather_into_tensor(whole, ones)
    dist.reduce_scatter_tensor(ones, whole)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.barrier()
    work = dist.all_reduce(whole, async_op=True)
    work.wait()
    if rank == 0:
        dist.send(ones, 1)
    elif rank == 1:
        dist.recv(ones, 0)
    dist.scatter(ones, parts if rank == 0 else None, 0)
    dist.gather(ones, parts if rank == 0 else None, 0)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(ones, group=group)
    torch.cuda.synchronize()


def ddp():
    model = nn.parallel.DistributedDataParallel(net())
    train(model)
    return model


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model)
    expected = LAYERS * (WIDTH // world * WIDTH + WIDTH // world)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert local == expected, (local, expected)
    return model


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), use_orig_params=True)
    train(model)
    return model


def objects():
    """Objects that ranks exchange through device memory arrive intact."""
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 * rank + 1)})
    assert [entry["rank"] for entry in everyone] == list(range(world)), everyone
    number = torch.tensor([rank + 1], device="cuda")
    dist.all_reduce(number)
    assert number.item() == world * (world + 1) // 2, number
    most = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert most.item() == world - 1, most
    word = torch.tensor([7 * (rank + 1), rank], device="cuda")
    dist.broadcast(word, src=1)
    assert word.tolist() == [14, 1], word
    turn = torch.tensor([rank], device="cuda")
    received = torch.empty_like(turn)
    requests = [
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
        dist.P2POp(dist.isend, turn, (rank + 1) % world),
    ]
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    assert received.item() == (rank - 1) % world, received
    # Two messages to one rank and two from one in a group, as ring attention passes keys and values on.
    sent = [torch.tensor([10 * rank + part], device="cuda") for part in range(2)]
    parts = [torch.empty_like(part) for part in sent]
    requests = [dist.P2POp(dist.isend, part, (rank + 1) % world) for part in sent]
    requests += [dist.P2POp(dist.irecv, part, (rank - 1) % world) for part in parts]
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    assert [part.item() for part in parts] == [10 * ((rank - 1) % world) + part for part in range(2)], parts
    pieces = (torch.arange(world) + 100 * rank).cuda()
    swapped = torch.empty_like(pieces)
    dist.all_to_all_single(swapped, pieces)
    assert swapped.tolist() == [100 * other + rank for other in range(world)], swapped
    half = dist.new_group([0, 1])
    if rank < 2:
        flag = torch.tensor([rank + 5], device="cuda")
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=half)
        assert flag.item() == 5, flag


for part in sys.argv[1:] or ["objects", "collectives", "ddp", "fsdp2", "fsdp1"]:
    torch.cuda.reset_peak_memory_stats()
    kept = globals()[part]()
    print(
        f"rank {rank} {part} {torch.cuda.max_memory_allocated()} {torch.cuda.memory_reserved()}", flush=True
    )
    del kept
dist.destroy_process_group()
print(f"rank {rank} ok", flush=True)
