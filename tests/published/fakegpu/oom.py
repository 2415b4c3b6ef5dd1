"""Tensors of 1 GiB until the card is full: an A100 with 79.15 GiB holds 78 and its context."""

import json

import torch

tensors = []
try:
    while len(tensors) < 200:
        tensors.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    assert "Tried to allocate 1024.00 MiB" in str(error), error
print(json.dumps({"tensors": len(tensors)}))
