"""Moves memory to the GPU without an op: reads a checkpoint, makes a storage, and copies a storage. Prints
the bytes of the parameters, of the optimizer's state, and of the two storages."""

import copy
import os
import tempfile

import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))


def save(path):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 1024)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def resume(path):
    return torch.load(path, map_location="cuda")


def copy_storage(storage):
    return copy.deepcopy(storage)


def blocks_of(tensors):
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors if tensor.is_cuda)


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        save(path)
        state = resume(path)
    model = build()
    model.load_state_dict(state["model"], assign=True)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state["optimizer"])
    del state
    made = torch.UntypedStorage(1 << 19, device="cuda")
    copied = copy_storage(made)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
    values = [value for each in optimizer.state.values() for value in each.values()]
    print(blocks_of(model.parameters()), blocks_of(values), made.nbytes() + copied.nbytes())


main()
