"""Runs out of memory in step 12, with the losses of all steps in a list; `clean` keeps none."""

import sys

import torch


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(14):
        inputs = torch.randn(1024, 256, device="cuda")
        loss = model(inputs).square().mean()
        if "clean" not in sys.argv:
            losses.append(model(inputs).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 11:
            try:
                torch.empty(1 << 40, device="cuda")
            except torch.OutOfMemoryError:
                print("out of memory in step", step + 1)


main()
