"""Trains small GPTs of many shapes, each in a child of its own; scripts/ranks-at-scale traces it.

    train_shapes.py SHAPES STEPS

torch is imported once, before the first fork. The sizes, the optimizer and the number of steps differ; every
tenth model keeps the graph of each loss, so its memory grows.
"""

import os
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT


def train(number, steps):
    choose = random.Random(number)
    width, context = 64 * choose.randint(1, 4), 64 * choose.randint(1, 4)
    batch, layers = choose.randint(1, 8), choose.randint(1, 8)
    optimizers = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop
    torch.set_num_threads(1)
    with torch.device("cuda"):
        model = GPT(512, context, width, 2, layers)
    optimizer = choose.choice(optimizers)(model.parameters(), lr=1e-4)
    kept = []
    for _ in range(steps + choose.randint(0, steps)):
        tokens = torch.randint(512, (batch, context)).cuda()
        loss = model(tokens, tokens)
        loss.backward(retain_graph=number % 10 == 9)
        if number % 10 == 9:
            kept.append(loss)
        optimizer.step()
        optimizer.zero_grad()


shapes, steps = int(sys.argv[1]), int(sys.argv[2])
for number in range(shapes):
    child = os.fork()
    if child == 0:
        train(number, steps)
        sys.exit()
    status = os.waitpid(child, 0)[1]
    if status:
        sys.exit(f"shape {number}: status {status}")
