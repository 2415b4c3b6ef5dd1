"""Allocates one tensor: one_tensor.py MIB. For the test of the range of the context's size."""

import sys

import torch

print(torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda").numel())
