"""A program for observers.py that makes the tracer run Python: it trains small models."""

import contextlib
import copy

import torch


class Scale(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device="cuda"))
        self.register_buffer("offset", torch.zeros(size, device="cuda"))

    def forward(self, x, fail=False):
        if fail:
            raise ValueError("the model's own error")
        return x * self.weight + self.offset


class Model(torch.nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, size, device="cuda"), Scale(size)])

    def forward(self, x, fail=False):
        x = torch.relu(self.layers[0](x))
        return self.layers[1](x, fail=fail)


class Own(torch.optim.SGD):
    """An optimizer class of the program, made after the tracer was installed."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16, device="cuda")).sum()
        loss.backward()
        optimizer.step()


def work(in_thread):
    """Does everything that makes the tracer run Python: the first allocation, calls, backwards, steps, the
    end of a module, an OOM."""
    model = Model()
    teacher = copy.deepcopy(model)
    train(model, torch.optim.Adam(model.parameters(), lr=0.1), 4)
    train(model, Own(model.parameters(), lr=0.1), 2)
    with contextlib.suppress(ValueError):
        model(torch.ones(4, 16, device="cuda"), fail=True)
    embedding = torch.nn.Embedding(32, 8, sparse=True, device="cuda")
    sparse = torch.optim.SparseAdam(embedding.parameters())
    for _ in range(2):
        embedding(torch.arange(4, device="cuda")).sum().backward()
        sparse.step()
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    del teacher, sparse, embedding
    in_thread(lambda: train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2))


# Make the first optimizer now: it imports dynamo, which causes millions of events.
torch.optim.SGD([torch.zeros(1)])
