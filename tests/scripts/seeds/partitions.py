"""Trains a model whose parameters, gradients and optimizer state are divided over the ranks.

    partitions.py CASE...   under torchrun, or DeepSpeed's launcher for the cases `deepspeed1` to `deepspeed3`

Several cases run as forked.py says.

At the end it marks `last`, and prints a line of JSON: the bytes that each category has by arithmetic, and the
bytes that torch has allocated.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.cuda import nvtx
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked

WIDTH, LAYERS, STEPS = 512, 6, 6
# The number of elements in a bucket of DeepSpeed.
BUCKET = 400_000


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def last(expected):
    """Ends a case."""
    nvtx.mark("last")
    allocated = torch.cuda.memory_allocated()
    answer = {"case": case, "pid": os.getpid(), "expected": expected, "allocated": allocated}
    # One write, because both ranks print into the same pipe.
    print(json.dumps(answer) + "\n", end="", flush=True)


def bytes_of(parameters):
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def trained(net, optimizer):
    for step in range(STEPS):
        net(torch.ones(8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        if step < STEPS - 1:
            optimizer.zero_grad()
        # DDP makes its buckets anew after the first step. NCCL's watchdog, which looks every 100 ms, must
        # have let go of the first ones before.
        time.sleep(0.5 if step < 2 else 0)


def ddp(**options):
    net = DistributedDataParallel(model().cuda(), **options)
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    whole = bytes_of(net.parameters())
    # Without views, the gradients are copied into the buckets.
    copies = 1 if options else 2
    last({"parameter": whole, "gradient": copies * whole, "optimizer_state": 2 * whole})


def ddp_views():
    ddp(gradient_as_bucket_view=True)


def zero(overlap=False, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model().cuda(), static_graph=overlap)
    kind = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(net.parameters(), kind, overlap_with_ddp=overlap, **options)
    if overlap:
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        net.register_comm_hook(None, hook_with_zero_step(allreduce_hook, net, optimizer))
    trained(net, optimizer)
    whole = bytes_of(net.parameters())
    own = bytes_of(optimizer.optim.param_groups[0]["params"])
    assert 0 < own < whole, (own, whole)
    last({"parameter": whole, "gradient": 2 * whole, "optimizer_state": 2 * own})


def zero_buckets():
    zero(parameters_as_bucket_view=True)


def zero_overlap():
    zero(overlap=True)


def deepspeed(stage):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 0,
        },
    }
    net = model()
    count = sum(parameter.numel() for parameter in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters())
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)).float().sum())
        engine.step()
    own = count // dist.get_world_size()
    # Each rank has its part of the weights in float32, with two states of AdamW.
    expected = {"parameter": 2 * count, "gradient": 0, "optimizer_state": 3 * 4 * own, "bucket": 2 * BUCKET}
    if stage == 3:
        expected |= {"parameter": 2 * own, "gradient": 2 * own + 2 * BUCKET, "gathered": 2 * count // LAYERS}
    last(expected)


CASES = {each.__name__: each for each in (ddp, ddp_views, zero, zero_buckets, zero_overlap)}
CASES |= {f"deepspeed{stage}": lambda stage=stage: deepspeed(stage) for stage in (1, 2, 3)}

cases = [word for word in sys.argv[1:] if word in CASES]
case = forked.each(cases)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", **forked.group(case if len(cases) > 1 else ""))
CASES[case]()
dist.destroy_process_group()
