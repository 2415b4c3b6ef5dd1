"""Prints its id and trains until the file that its argument names exists. Keeps the output of each step in a
list."""

import os
import sys
import time
from pathlib import Path

import torch


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    while not Path(sys.argv[1]).exists():
        output = model(torch.randn(256, 256, device="cuda"))
        history.append(output.detach())
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(history) == 4:
            print(os.getpid(), flush=True)
        time.sleep(0.01)


main()
