"""One case for each capability that `scripts/test-matrix` checks: capabilities.py CASE...

The cases run as forked.py says. A case prints what the trace must have, as JSON, or raises. `totals`,
`threads`, `loader` and `compile` leave checkpoints for verify.py.
"""

import json
import os
import random
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))

import forked
import torch

ALLOCATIONS = int(os.environ.get("ALLOCATIONS", 1000))  # of each of the eight threads
BATCHES, ROWS = 6, 32


class Inner(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return torch.relu(x @ self.weight)


class Net(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = Inner(width), Inner(width)

    def forward(self, x):
        return self.second(self.first(x)) + 1


def train(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(batch, steps):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        train(model, optimizer, batch)
        checkpoint("step")
    return model


def totals():
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1, 513, 3 << 20, (11 << 20) + 3)]
    trained(torch.randn(ROWS, 64, device="cuda"), 3)
    del held[1::2]
    checkpoint("freed")


def lines():
    """Prints the lines that lead to a block of a size of its own."""
    size = 7_340_033

    def allocate():
        frame, found = sys._getframe(), []
        block = torch.empty(size, dtype=torch.uint8, device="cuda"); line = frame.f_lineno  # fmt: skip # noqa: E702
        while frame is not None:
            found.append([frame.f_code.co_name, line if not found else frame.f_lineno])
            frame = frame.f_back
        return block, found

    def generated():
        yield allocate()

    trained(torch.randn(ROWS, 64, device="cuda"), 1)
    for block, found in generated():
        names = [name for name, _ in found]
        print(json.dumps({"size": block.numel(), "lines": found[: names.index("<module>") + 1]}))


def modules():
    """Prints the module of a block of a size of its own, for the forward and the backward."""
    model, x = Net(384).cuda(), torch.randn(999, 384, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
    print(json.dumps({"size": 999 * 384 * 4, "modules": ["Net.first", "Net.second", "Net"]}))


def retained():
    import memtrace

    model = Net(256).cuda()
    optimizer, history = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(8):
        output = model(torch.randn(256, 256, device="cuda"))
        history.append(output.detach())
        output.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = memtrace.retained()
    print(json.dumps({"holders": [holder["holder"] for holder in found]}))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return BATCHES * ROWS

    def __getitem__(self, index):
        return torch.full((64,), float(index))


def loader():
    """Trains from workers that start in every way; the first is the default of this Python."""
    for context in (None, "fork", "forkserver"):
        batches = torch.utils.data.DataLoader(
            Rows(), batch_size=ROWS, num_workers=2, pin_memory=True, multiprocessing_context=context
        )
        model, seen = Net().cuda(), 0
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches:
            train(model, optimizer, batch.cuda(non_blocking=True))
            seen += 1
        assert seen == BATCHES, (context, seen)
        checkpoint(str(context))


def threads():
    """Eight threads allocate, train new models with optimizers, and free blocks of each other."""
    passed, lock, failures = [], threading.Lock(), []

    def work(seed):
        rng, mine = random.Random(seed), []
        model, x = Net().cuda(), torch.randn(ROWS, 64, device="cuda")
        try:
            for number in range(ALLOCATIONS):
                mine.append(torch.empty(rng.randrange(1, 300_000), dtype=torch.uint8, device="cuda"))
                if number % 8 == 0:
                    model(x).sum().backward()
                if number % 64 == 0:
                    model = Net().cuda()
                    train(model, torch.optim.AdamW(model.parameters()), x)
                if len(mine) > 10:
                    with lock:
                        passed.append(mine.pop(rng.randrange(len(mine))))
                with lock:
                    if len(passed) > 40:
                        passed.pop(rng.randrange(len(passed)))
        except BaseException as error:
            failures.append(repr(error))
            raise

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    checkpoint("threads")
    passed.clear()
    checkpoint("freed")
    assert not failures, failures
    print(json.dumps({"gil": getattr(sys, "_is_gil_enabled", lambda: True)()}))


def compile():
    model = torch.compile(Net().cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train(model, optimizer, torch.randn(ROWS, 64, device="cuda"))
        checkpoint("step")


if __name__ == "__main__":
    chosen = forked.each(sys.argv[1:])
    from checkpoints import checkpoint

    globals()[chosen]()
