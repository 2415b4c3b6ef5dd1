"""Training loops that keep more than they need: loops.py KIND [fix]."""

import os
import sys

import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 6))
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8))
).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def batch(rows=2048):
    return torch.randn(rows, 1024, device="cuda")


def training_step():
    loss = model(batch(4096)).square().mean()
    return {"loss": loss, "log": loss.item()}


def update(loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulate():
    for _ in range(STEPS):
        total_loss = 0
        for _ in range(8):
            loss = model(batch()).square().mean() / 8
            if FIX:
                loss.backward()
            total_loss += loss.item() if FIX else loss
        if not FIX:
            total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def last_loss():
    for _ in range(STEPS):
        result = training_step()
        result["loss"].backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        if FIX:
            result = None


def validate():
    for _ in range(3):
        update(training_step()["loss"])
    with torch.set_grad_enabled(not FIX):
        val_loss = 0
        for _ in range(STEPS):
            val_loss += model(batch()).square().mean()
    print(val_loss.item() / STEPS)


def predictions():
    outputs = []
    for _ in range(10 * STEPS):
        with torch.no_grad():
            outputs.append(model(torch.randn(8192, 1024, device="cuda")))
            if FIX:
                outputs[-1] = outputs[-1].cpu()
    torch.cat([output.cpu() for output in outputs])


def no_grad_forgotten():
    model.eval()
    scores = []
    for _ in range(STEPS):
        with torch.set_grad_enabled(not FIX):
            scores.append(model(batch()).mean())
    print(torch.stack(scores).mean().item())


def hidden():
    cell = nn.GRUCell(1024, 1024).cuda()
    state = torch.zeros(4096, 1024, device="cuda")
    for _ in range(4 * STEPS):
        state = cell(torch.randn(4096, 1024, device="cuda"), state.detach() if FIX else state)
        loss = state.square().mean()
        if FIX:
            loss.backward()


def dataset():
    data = torch.randn(400_000, 1024)
    if not FIX:
        data = data.cuda()
    for step in range(STEPS):
        update(model(data[2048 * step :][:2048].cuda()).square().mean())


{
    "accumulate": accumulate,
    "last-loss": last_loss,
    "validate": validate,
    "predictions": predictions,
    "no-grad": no_grad_forgotten,
    "hidden": hidden,
    "dataset": dataset,
}[KIND]()
