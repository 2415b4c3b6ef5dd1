"""Programs of the growth corpus whose memory grows by CUDA graphs, torch.compile, cuDNN or NCCL."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, Steps, Trainer, args, marked, mlp
from torch import nn

LONGEST = 12288


def graphs_per_shape() -> Steps:
    """A server keeps a graph for each length, with its input and output. Remedy: one length."""
    model = mlp().eval()
    graphs: dict[int, tuple] = {}
    for step in range(STEPS):
        rows = LONGEST if args.remedy else 1024 + 256 * step
        with marked(step), torch.no_grad():
            if rows not in graphs:
                given = torch.randn(rows, 1024, device=DEVICE)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = model(given)
                graphs[rows] = graph, given, out
            graphs[rows][0].replay()
        yield


def graphs_of_one_output() -> Steps:
    """Like graphs_per_shape, but all graphs share one input and one output, so only their pools grow.

    Remedy: one length and one pool.
    """
    model = mlp(depth=8).eval()
    given, out = (torch.zeros(LONGEST, 1024, device=DEVICE) for _ in range(2))
    pool = torch.cuda.graph_pool_handle() if args.remedy else None
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for step in range(STEPS):
        rows = LONGEST if args.remedy else 1024 + 256 * step
        with marked(step), torch.no_grad():
            if rows not in graphs:
                graphs[rows] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[rows], pool=pool):
                    out[:rows] = model(given[:rows])
            graphs[rows].replay()
        yield


def compiled_graphs() -> Steps:
    """torch.compile compiles anew for each length, into CUDA graphs. Remedy: one length."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4 * STEPS
    model = torch.compile(mlp().eval(), backend="cudagraphs", dynamic=False)
    for step in range(STEPS):
        rows = LONGEST if args.remedy else 1024 + 256 * step
        with marked(step), torch.no_grad():
            model(torch.randn(rows, 1024, device=DEVICE))
        yield


def benchmark() -> Steps:
    """cuDNN looks for the fastest plan for each new size of image. Remedy: one size."""
    torch.backends.cudnn.benchmark = True
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3), nn.ReLU())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        side = 100 if args.remedy else 100 + 4 * step
        optimizer.zero_grad()
        model(torch.randn(4, 64, side, side, device=DEVICE)).square().mean().backward()
        optimizer.step()
        yield


def few_streams() -> Steps:
    """Loads on one stream, works on another, with new sizes each time. Remedy: one stream and size."""
    trainer = Trainer()
    side = torch.cuda.Stream()
    for _ in range(STEPS):
        rows = 4096 if args.remedy else random.randrange(1024, 8192)
        with torch.cuda.stream(torch.cuda.current_stream() if args.remedy else side):
            loaded = [torch.randn(rows, 1024, device=DEVICE) for _ in range(8)]
        torch.cuda.synchronize()
        trainer.finish(trainer.model(loaded[0]).square().mean())
        del loaded
        yield


def groups() -> Steps:
    """Creates a new process group in each epoch. Remedy: destroy_process_group()."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.Random().randrange(20000, 30000))}
    dist.init_process_group("nccl", rank=0, world_size=1)
    trainer = Trainer()
    for _ in range(STEPS):
        group = dist.new_group([0])
        dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        trainer.train()
        if args.remedy:
            dist.destroy_process_group(group)
        yield
    dist.destroy_process_group()


PROGRAMS = [
    graphs_per_shape, graphs_of_one_output, compiled_graphs, benchmark, few_streams, groups,
]  # fmt: skip
