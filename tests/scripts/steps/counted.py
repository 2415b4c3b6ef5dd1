"""Programs with several optimizers, or with one that is not torch's.

Each runs in a child of its own and prints its process id and its name."""

import gc
import os
import sys

import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it
from torch import nn

ITERATIONS = 6


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.randn(32, 128, device="cuda")).square().mean()


def one() -> None:
    """Accumulates gradients, and evaluates in the middle and after the last step."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for number in range(ITERATIONS):
        for _ in range(3):
            loss_of(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (2, ITERATIONS - 1):
            with torch.no_grad():
                loss_of(net)


def same_class() -> None:
    nets = [model(), model()]
    optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
    for _ in range(ITERATIONS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()


def per_parameter() -> None:
    net = model()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in net.parameters()}

    def step(parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(ITERATIONS):
        loss_of(net).backward()


def stages() -> None:
    """A second optimizer takes over; the first one is gone or, in the second round, still there."""
    net, kept = model(), []
    for lasting in (False, True):
        for kind in (torch.optim.Adam, torch.optim.SGD):
            optimizer = kind(net.parameters(), lr=0.1)
            for _ in range(ITERATIONS // 2):
                loss_of(net).backward()
                optimizer.step()
                optimizer.zero_grad()
            if lasting:
                kept.append(optimizer)
            del optimizer


def critic() -> None:
    """A critic steps three times for each step of the generator, which steps first."""
    generator, discriminator = model(), model()
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.Adam(discriminator.parameters())
    for _ in range(ITERATIONS):
        loss_of(generator).backward()
        first.step()
        first.zero_grad()
        for _ in range(3):
            loss_of(discriminator).backward()
            second.step()
            second.zero_grad()


def own() -> None:
    """Trains without an optimizer of torch, with state of the program's own."""
    net = model()
    moments: dict = {}
    for _ in range(ITERATIONS):
        data = torch.randn(32, 128).to("cuda")
        target = torch.randn(32, 128).to("cuda")
        (net(data) - target).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter not in moments:
                    moments[parameter] = torch.zeros_like(parameter)
                moments[parameter].mul_(0.9).add_(parameter.grad)
                parameter.sub_(moments[parameter], alpha=0.01)
                parameter.grad = None
    with torch.no_grad():
        net(data)


def forwards() -> None:
    net = model()
    with torch.no_grad():
        for _ in range(ITERATIONS):
            net(torch.randn(32, 128, device="cuda"))


gc.freeze()  # see forked.py
for case in (one, same_class, per_parameter, stages, critic, own, forwards):
    child = os.fork()
    if child == 0:
        case()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    print(child, case.__name__, status, flush=True)
