"""Compared with torch: the GPT of examples/train_gpt.py, with a checkpoint between every two phases."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))

from checkpoints import checkpoint
from train_gpt import GPT

VOCABULARY, CONTEXT, BATCH = 50304, 256, 4

torch.manual_seed(0)
torch.cuda.init()
checkpoint("start")
with torch.device("cuda"):
    model = GPT(VOCABULARY, CONTEXT, width=256, heads=4, layers=4)
optimizer = torch.optim.AdamW(model.parameters())
checkpoint("built")
for step in range(3):
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT)).cuda()
    targets = torch.randint(VOCABULARY, (BATCH, CONTEXT)).cuda()
    loss = model(tokens, targets)
    checkpoint("forward")
    loss.backward()
    checkpoint("backward")
    optimizer.step()
    checkpoint("optimizer")
    optimizer.zero_grad(set_to_none=True)
    checkpoint("zero_grad")
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
del loss, model, optimizer, tokens, targets
checkpoint("deleted")
torch.cuda.empty_cache()
checkpoint("emptied")
