"""Thirty tensors of 3 MiB: PyTorch's allocator takes segments of 20 MiB for them, six in each."""

import json

import torch

tensors = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(30)]
print(json.dumps({"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}))
