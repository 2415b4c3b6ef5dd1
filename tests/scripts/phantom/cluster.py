"""Trains a small model with one kind of parallelism for two steps, and prints PyTorch's memory figures.

Started by a launcher: every rank runs this script. The first argument is the kind, such as `ddp`,
or `groups:gloo` with an option. Several kinds with commas between them run as forked.py says.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL_RANK, PER_NODE = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
WIDTH, LENGTH, BATCH, LAYERS = 256, 64, 4, 4
DEVICE = torch.device("cuda", LOCAL_RANK)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        # With tensor parallelism each rank has some of the heads.
        q, k, v = (m(y).unflatten(-1, (-1, 32)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def steps(model, optimizer=None, foreach=True):
    """Trains two steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    for _ in range(2):
        x = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)


def ddp():
    from torch.nn.parallel import DistributedDataParallel

    steps(DistributedDataParallel(Model().to(DEVICE), device_ids=[LOCAL_RANK]))


def zero1():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Model().to(DEVICE), device_ids=[LOCAL_RANK])
    steps(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2():
    steps(shard(Model().to(DEVICE), init_device_mesh("cuda", (WORLD,))))


def hsdp():
    mesh = init_device_mesh("cuda", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    steps(shard(Model().to(DEVICE), mesh))


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    steps(FSDP(Model().to(DEVICE), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=LOCAL_RANK))


def parallelize(model, mesh, sequence):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("o", "down")}
        if sequence:
            plan = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
            plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
            plan["norm"] = SequenceParallel()
            plan["q"] = plan["k"] = plan["v"] = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(block, mesh, plan)
    if sequence:
        split = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        parallelize_module(
            model,
            mesh,
            {"blocks.0": split, "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
        )
    return model


def tp():
    steps(parallelize(Model().to(DEVICE), init_device_mesh("cuda", (WORLD,)), False), foreach=False)


def sp():
    steps(parallelize(Model().to(DEVICE), init_device_mesh("cuda", (WORLD,)), True), foreach=False)


def fsdp2_tp():
    mesh = init_device_mesh("cuda", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    steps(shard(parallelize(Model().to(DEVICE), mesh["tp"], True), mesh["dp"]), foreach=False)


def cp():
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (2, WORLD // 2), mesh_dim_names=("dp", "cp"))
    model = shard(Model().to(DEVICE, torch.bfloat16), init_device_mesh("cuda", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        x = torch.randn(BATCH, 4096, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with (
            context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[1]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def pp():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cuda", (4, WORLD // 4), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    whole = Model()
    module = nn.Sequential(whole.blocks[number], *([whole.head] if number == 3 else [])).to(DEVICE)
    # Shapes are given, because otherwise the stages would exchange objects to agree on them.
    hidden, last = (torch.empty(1, LENGTH, size, device=DEVICE) for size in (WIDTH, 1000))
    group = mesh.get_group("pp")
    stage = PipelineStage(
        module, number, 4, DEVICE, input_args=hidden, output_args=last if number == 3 else hidden, group=group
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, _: out.float().square().mean())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for _ in range(2):
        x = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)
        target = torch.zeros(BATCH, device=DEVICE)
        if number == 0:
            schedule.step(x)
        elif number == 3:
            schedule.step(target=target)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


def ep():
    """Experts on all ranks, which exchange the numbers of tokens and then the tokens."""
    expert = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    optimizer = torch.optim.AdamW(expert.parameters(), lr=1e-3)
    for _ in range(2):
        tokens = torch.randn(WORLD * 8, WIDTH, device=DEVICE)
        sent = torch.full((WORLD,), 8, device=DEVICE)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sizes = received.tolist()
        mine = torch.empty(sum(sizes), WIDTH, device=DEVICE)
        dist.all_to_all_single(mine, tokens, sizes, sent.tolist())
        expert(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def groups():
    """Groups, splits, objects and barriers, on the GPU and through gloo."""
    ranks = list(range(RANK // 2 * 2, RANK // 2 * 2 + 2))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, min(WORLD, 16), 2)]
    mine = dist.new_subgroups(2)[0]
    for group in (None, mine):
        total = torch.ones(3, device=DEVICE)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [dist.get_world_size(group)] * 3, total
        largest = torch.tensor(7.0, device=DEVICE)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        assert largest.item() == 7, largest
    gloo = dist.new_group(backend="gloo")
    host = torch.arange(4)
    dist.all_reduce(host, group=gloo)
    assert host.tolist() == [n * WORLD for n in range(4)], host
    for root in (0, 1):  # `ProcessGroup.reduce` also takes the root as a number.
        host = torch.ones(1)
        gloo.reduce(host, root).wait()
        # Between ranks that all run, gloo also writes into the tensors of the others.
        if root == RANK or "Gloo" not in type(gloo._get_backend(host.device)).__name__:
            assert host.item() == (WORLD if root == RANK else 1), host
    for group in (None, gloo):
        objects = [None] * WORLD
        dist.all_gather_object(objects, {"config": "a" * 100}, group=group)
        assert objects == [{"config": "a" * 100}] * WORLD
        dist.barrier(group=group)
    objects = ["from rank 0"]
    dist.broadcast_object_list(objects, src=0, group=gloo)
    assert objects == ["from rank 0"]
    gathered = [None] * WORLD if RANK == 0 else None
    dist.gather_object((1, 2), gathered, dst=0, group=gloo)
    assert RANK or gathered == [(1, 2)] * WORLD
    dist.monitored_barrier(gloo)
    parts = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(parts, torch.ones(2), group=gloo)
    assert all(part.tolist() == [1, 1] for part in parts)
    if dist.distributed_c10d._get_default_group().bound_device_id:
        half = dist.split_group(split_ranks=[list(range(0, WORLD, 2)), list(range(1, WORLD, 2))])
        total = torch.ones(1, device=DEVICE)
        dist.all_reduce(total, group=half)
        assert total.item() == WORLD // 2, total
    del ranks, pairs


def chosen():
    """Returns the kind, and arguments of `init_process_group`. Forks a child for each of several kinds."""
    kinds = sys.argv[1].split(",")
    if len(kinds) == 1:
        return kinds[0], {}
    if "groups" not in sys.argv[1]:
        # Once, not in every child.
        import torch._dynamo
        import torch.distributed.fsdp
        import torch.distributed.optim
        import torch.distributed.tensor.parallel  # noqa: F401

    kind = forked.each(kinds, is_frozen=True)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return kind, forked.group(kind)
    # Rank 0 would serve the store of a kind, and end before the other ranks have read it.
    store = dist.FileStore(f"{os.environ['CLUSTER_STORE']}.{kind}", WORLD)
    return kind, {"store": store, "rank": RANK, "world_size": WORLD}


def main():
    name, options = chosen()
    kind, *options_of_kind = name.split(":")
    # The collector runs after a number of new objects, and this moment differs among stand-ins.
    gc.disable()
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    if "eager" in options_of_kind:
        options["device_id"] = DEVICE
    method = next((word for word in sys.argv if "://" in word), None)
    if method:
        options |= {"init_method": method, "rank": RANK, "world_size": WORLD}
    dist.init_process_group("cpu:gloo,cuda:nccl" if "gloo" in options_of_kind else "nccl", **options)
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD)
    globals()[kind]()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    keys = ["allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.allocated"]
    figures = " ".join(str(stats[key]) for key in keys)
    print(f"rank {RANK} of {WORLD} {kind} {figures}\n", end="", flush=True)
    dist.destroy_process_group()


main()
