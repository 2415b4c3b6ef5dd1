"""Programs whose memory in use grows, each from a known cause, for scripts/growth-corpus.

    python programs.py NAME            # trains, and prints PyTorch's own figures after each step
    python programs.py NAME --remedy   # the same with the cause removed

After each step a line `LEVEL {json}` has what PyTorch and the driver count in bytes: allocated, its highest
value since the step before, reserved, and in use on the device.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import random
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import libraries
import threads
import torch
from common import DEVICE, MIB, STEPS, Steps, Trainer, args, kept, level, marked, mlp
from torch import nn

# Programs that keep something.


def losses() -> Steps:
    trainer = Trainer()
    for _ in range(STEPS):
        out = trainer.forward(2048)
        loss = out.square().mean()
        trainer.finish(loss)
        loss = trainer.forward(256).square().mean()
        kept.append(loss.item() if args.remedy else loss)
        yield


def detached() -> Steps:
    trainer = Trainer()
    for _ in range(STEPS):
        out = trainer.train().detach()
        yield
        kept.append(out.cpu() if args.remedy else out)


def later(result: torch.Tensor | float) -> Callable[[], str]:
    return lambda: f"{result}"


def closures() -> Steps:
    trainer = Trainer()
    for _ in range(STEPS):
        out = trainer.train().detach()
        yield
        kept.append(later(out.mean().item() if args.remedy else out))


def cache() -> Steps:
    trainer = Trainer()
    features: OrderedDict[int, torch.Tensor] = OrderedDict()
    for step in range(STEPS):
        features[step] = trainer.train().detach()
        yield
        while args.remedy and len(features) > 2:
            features.popitem(last=False)


def fails(trainer: Trainer) -> None:
    features = trainer.forward(2048).detach()
    raise ValueError(f"no label for {len(features)} rows")


def tracebacks() -> Steps:
    trainer = Trainer()
    for _ in range(STEPS):
        trainer.train()
        yield
        try:
            fails(trainer)
        except ValueError as error:
            kept.append(str(error) if args.remedy else error)


def hooks() -> Steps:
    trainer = Trainer()
    for _ in range(STEPS):
        scale = torch.ones(2048, trainer.width, device=DEVICE)
        handle = trainer.model[0].register_forward_hook(lambda _m, _i, out, scale=scale: out * scale)
        trainer.train()
        yield
        if args.remedy:
            handle.remove()


class Metric:
    def __init__(self) -> None:
        self.preds: list[torch.Tensor] = []

    def update(self, preds: torch.Tensor) -> None:
        self.preds.append(preds)


def metric() -> Steps:
    trainer, accuracy = Trainer(), Metric()
    for step in range(STEPS):
        accuracy.update(trainer.train().detach())
        yield
        if args.remedy and step % 5 == 4:
            accuracy.preds.clear()


def retained_graph() -> Steps:
    trainer = Trainer()
    total = torch.zeros((), device=DEVICE)
    for _ in range(STEPS):
        loss = trainer.forward(512).square().mean()
        trainer.finish(loss, retain_graph=not args.remedy)
        total = total + loss.item() if args.remedy else total + loss
        yield


def hidden_state() -> Steps:
    """Carries a recurrent cell's state from step to step together with its graph; marks the steps."""
    cell = nn.GRUCell(1024, 1024).to(DEVICE)
    hidden = torch.zeros(512, 1024, device=DEVICE)
    for step in range(STEPS):
        with marked(step), torch.set_grad_enabled(not args.remedy):
            hidden = cell(torch.randn(512, 1024, device=DEVICE), hidden)
        yield


def deleted_models() -> Steps:
    """Each round makes a new model and adds it to the one optimizer, which never drops a model."""
    optimizer = torch.optim.Adam([torch.zeros(1, device=DEVICE, requires_grad=True)])
    for _ in range(STEPS):
        model = mlp(512, 2)
        if args.remedy:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        optimizer.add_param_group({"params": model.parameters()})
        optimizer.zero_grad()
        model(torch.randn(512, 512, device=DEVICE)).square().mean().backward()
        optimizer.step()
        yield
        del model
        torch.cuda.empty_cache()


def optimizer_each_epoch() -> Steps:
    """Makes a new optimizer every second step. Marks the steps, since no single optimizer ends them all."""
    trainer = Trainer()
    for step in range(STEPS):
        with marked(step):
            trainer.train()
            if step % 2:
                if not args.remedy:
                    kept.append(trainer.optimizer)
                trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
        yield


def copies() -> Steps:
    trainer = Trainer(width=512)
    for _ in range(STEPS):
        trainer.train()
        yield
        average = copy.deepcopy(trainer.model)
        kept[:] = [average] if args.remedy else [*kept, average]


def gathered_results() -> Steps:
    """Joins the results of a whole epoch to one tensor, which each step copies anew."""
    trainer = Trainer()
    results = torch.empty(0, 1024, device=DEVICE)
    for _ in range(STEPS):
        out = trainer.train().detach()
        yield
        results = out if args.remedy else torch.cat([results, out])


# Programs whose steps get larger.


def curriculum() -> Steps:
    trainer = Trainer()
    for step in range(STEPS):
        trainer.train(1024 if args.remedy else 1024 + 512 * step)
        yield


def proposals() -> Steps:
    """A detector's second stage: the number of boxes rises as it learns."""
    trainer = Trainer()
    head = nn.Linear(1024, 4096).to(DEVICE)
    for step in range(STEPS):
        boxes = 300 if args.remedy else 300 + 200 * step
        features = trainer.forward(2048)
        picked = features[torch.randint(0, 2048, (boxes,), device=DEVICE)]
        trainer.finish(head(picked).square().mean() + features.mean())
        yield


def outlier() -> Steps:
    trainer = Trainer()
    for step in range(STEPS):
        trainer.train(16384 if step == 25 and not args.remedy else 1024)
        yield


def validation() -> Steps:
    trainer = Trainer()
    for step in range(STEPS):
        trainer.train(1024)
        yield
        if step % 10 == 9:
            with torch.set_grad_enabled(not args.remedy):
                sum(trainer.forward(1024).mean() for _ in range(16))


def save() -> Steps:
    trainer = Trainer(width=2048)
    for step in range(STEPS):
        trainer.train(256)
        yield
        if step % 10 == 9:
            state = trainer.model.state_dict() | {
                f"{number}.{name}": value
                for number, state in trainer.optimizer.state_dict()["state"].items()
                for name, value in state.items()
            }
            saved = {name: value.cpu() if args.remedy else value.clone() for name, value in state.items()}
            del saved


def batch_grows() -> Steps:
    """Doubles the batch every 10 steps, as some schedules do."""
    trainer = Trainer()
    for step in range(STEPS):
        trainer.train(1024 if args.remedy else 1024 << (step // 10))
        yield


# Programs in which the allocator's cache grows.


def lengths() -> Steps:
    """Batches of random length. Remedy: expandable segments, set by scripts/growth-corpus."""
    trainer = Trainer()
    for _ in range(2 * STEPS):
        trainer.train(1024 if args.remedy else random.randrange(1024, 8192))
        yield


def images() -> Steps:
    """Runs images of any size through convolutions. Remedy: expandable segments."""
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3), nn.ReLU())]).to(
        DEVICE
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2 * STEPS):
        high, wide = random.randrange(200, 700), random.randrange(200, 700)
        optimizer.zero_grad()
        model(torch.randn(4, 16, high, wide, device=DEVICE)).square().mean().backward()
        optimizer.step()
        yield


def streams() -> Steps:
    """Runs the steps on 24 streams in turn, each of which keeps its freed blocks. Remedy: one stream."""
    trainer = Trainer()
    all_streams = [torch.cuda.Stream() for _ in range(1 if args.remedy else 24)]
    for step in range(STEPS):
        stream = all_streams[step % len(all_streams)]
        with torch.cuda.stream(stream):
            trainer.forward(4096).square().mean().backward()
        torch.cuda.synchronize()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        yield


# Programs that grow outside PyTorch.


def driver_memory() -> Steps:
    """A library that takes memory from the driver, and frees it only with the remedy."""
    trainer = Trainer()
    cuda = ctypes.CDLL("libcuda.so.1")
    for _ in range(STEPS):
        trainer.train()
        yield
        pointer = ctypes.c_uint64()
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(32 * MIB)):
            sys.exit("cuMemAlloc failed")
        if args.remedy:
            cuda.cuMemFree_v2(pointer)


NEIGHBOUR = """
import sys, torch
for line in sys.stdin:
    torch.cuda.caching_allocator_alloc(int(line), 0, 0)
    print("done", flush=True)
"""


def neighbour() -> Steps:
    """Another process on the same GPU grows. Remedy: it keeps its size."""
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        trainer = Trainer()
        for step in range(STEPS // 3):
            if step == 0 or not args.remedy:
                print(64 * MIB, file=other.stdin, flush=True)
                other.stdout.readline()
            trainer.train()
            time.sleep(1.2)  # memtrace samples the device once a second
            yield
        other.stdin.close()


# Memory that comes once and stays, or that has a limit.


def late_state() -> Steps:
    """Half of the model is frozen for the first steps, so its optimizer state comes late."""
    trainer = Trainer(width=2048)
    late = list(trainer.model.parameters())[4:]
    for step in range(STEPS):
        for parameter in late:
            parameter.requires_grad_(step >= 8 or args.remedy)
        trainer.train()
        yield


def window_cache() -> Steps:
    """A key-value cache with a limit: it fills up, and then keeps its size."""
    trainer = Trainer()
    for _ in range(STEPS):
        kept.append(trainer.train().detach())
        yield
        del kept[: -(1 if args.remedy else 10)]


def kv_cache() -> Steps:
    """Decoding with a cache that grows token by token, without an optimizer; the steps are marked."""
    model = mlp().eval()
    cache: list[torch.Tensor] = []
    for step in range(STEPS):
        with marked(step), torch.no_grad():
            cache.append(model(torch.randn(4096, 1024, device=DEVICE)))
            if args.remedy:
                del cache[:-4]
        yield


def flat() -> Steps:
    trainer = Trainer()
    for _ in range(STEPS):
        trainer.train()
        yield


def buckets() -> Steps:
    """Batches of four lengths. Remedy: all batches have the longest."""
    trainer = Trainer()
    for step in range(STEPS):
        trainer.train(4096 if args.remedy else [1024, 2048, 3072, 4096][step % 4])
        yield


def epoch_loss() -> Steps:
    """Adds up the losses of an epoch with their graphs, and begins anew in the next epoch."""
    trainer, total = Trainer(), 0.0
    for step in range(STEPS):
        penalty = trainer.forward(1024).square().mean()
        if step % 10 == 0:
            total = 0.0
        total = total + (penalty.item() if args.remedy else penalty)
        del penalty
        trainer.train(1024)
        yield


def memory_bank() -> Steps:
    """Appends the features of each step to one tensor, so each step replaces it with a larger one."""
    trainer = Trainer()
    bank = torch.empty(0, 1024, device=DEVICE)
    for _ in range(STEPS):
        out = trainer.forward(2048)
        bank = torch.cat([bank, out.detach()])
        if args.remedy:
            bank = bank[-2048:].clone()
        trainer.finish(out.square().mean())
        yield


def evaluation() -> Steps:
    """Evaluates every ten steps, and joins the results of all batches on the GPU, one after the other."""
    trainer = Trainer()
    for step in range(STEPS):
        trainer.train()
        yield
        if step % 10 == 4:
            results = torch.empty(0, 1024, device="cpu" if args.remedy else DEVICE)
            for _ in range(24):
                with torch.no_grad():
                    results = torch.cat([results, trainer.forward(2048).to(results.device)])
            del results


def replay_buffer() -> Steps:
    """A buffer of limited size: when it is full, each step drops its oldest entry."""
    trainer = Trainer()
    buffer: deque[torch.Tensor] = deque(maxlen=1 if args.remedy else 12)
    for _ in range(STEPS):
        out = trainer.forward(2048)
        buffer.append(out.detach())
        trainer.finish(out.square().mean())
        yield


# Two causes at once.


def leak_in_curriculum() -> Steps:
    trainer = Trainer()
    for step in range(STEPS):
        out = trainer.train(1024 if args.remedy else 1024 + 512 * step)
        yield
        if not args.remedy:
            kept.append(out[:64].detach().clone())


def curriculum_in_leak() -> Steps:
    trainer = Trainer()
    for step in range(STEPS):
        out = trainer.train(1024 if args.remedy else 1024 + 16 * step)
        yield
        if not args.remedy:
            kept.append(out.detach())


def metric_with_lengths() -> Steps:
    """Keeps the predictions of a metric, 0.5 MiB a step, while lengths vary. The cache grows most. Its remedy
    is expandable segments, set by scripts/growth-corpus; `--remedy` frees only the predictions."""
    trainer, accuracy = Trainer(), Metric()
    for _ in range(2 * STEPS):
        out = trainer.train(random.randrange(1024, 8192))
        yield
        accuracy.update(out[:128].detach().clone())
        if args.remedy:
            accuracy.preds.clear()


PROGRAMS = [
    losses, detached, closures, cache, tracebacks, hooks, metric, retained_graph, hidden_state,
    deleted_models, optimizer_each_epoch, copies, gathered_results, curriculum, proposals, outlier,
    validation, save, batch_grows, lengths, images, streams, driver_memory, neighbour, late_state,
    window_cache, kv_cache, flat, buckets, epoch_loss, memory_bank, evaluation, replay_buffer,
    leak_in_curriculum, curriculum_in_leak, metric_with_lengths,
    *libraries.PROGRAMS, *threads.PROGRAMS,
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[program.__name__ for program in PROGRAMS])
    parser.add_argument("--remedy", action="store_true")
    parser.parse_args(namespace=args)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    for _ in next(program for program in PROGRAMS if program.__name__ == args.name)():
        level()
        # memtrace samples memory outside PyTorch by time, and a step on a real GPU takes no less.
        time.sleep(0.02)


if __name__ == "__main__":
    main()
