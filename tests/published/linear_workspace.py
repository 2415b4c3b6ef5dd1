"""What stays allocated after a linear layer of one weight: the workspace that PyTorch gives cuBLAS."""

import torch
from harness import figure


def run():
    model = torch.nn.Linear(1, 1, device="cuda")
    model(torch.randn(1, 1, device="cuda"))


run()
torch.cuda.synchronize()
figure("after a linear layer", allocated=torch.cuda.memory_allocated())
