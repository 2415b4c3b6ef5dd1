"""PyTorch's own ways to run a model: torch_modes.py compile|reduce_overhead|graphs|torchscript|amp."""

import sys

import torch
from peaks import print_peak
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()


def train(model, parameters):
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(4):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compile():
    model = mlp()
    train(torch.compile(model), model.parameters())


def reduce_overhead():
    model = mlp()
    train(torch.compile(model, mode="reduce-overhead"), model.parameters())


def graphs():
    """A captured step of training, as in PyTorch's notes on CUDA graphs."""
    model, data = mlp(), torch.randn(64, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(4):
        data.copy_(torch.randn(64, 512, device="cuda"))
        graph.replay()


def torchscript():
    model = mlp()
    train(torch.jit.script(model), model.parameters())


def amp():
    model, scaler = mlp(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(64, 512, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print("scale", scaler.get_scale())


torch.manual_seed(0)
globals()[sys.argv[1]]()
print("done")
print_peak()
