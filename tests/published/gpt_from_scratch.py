"""Memory that is reserved after training the GPT of "Build a Large Language Model (From Scratch)".

The stages follow the book's page on training speed: the model as written out by hand, and the same after
each of the changes that the page names. GPT-2 small with a context of 1024; each batch is made up.

    gpt_from_scratch.py STAGE    # original mask bfloat16 classes flash padded batch
"""

import json
import sys

import torch
from harness import hand_gpt
from torch.nn import functional as F

hand_gpt.choose(sys.argv[1])
half = hand_gpt.STAGES.index(sys.argv[1]) >= 2
BATCH = 32 if sys.argv[1] == "batch" else 8


def loss_of(model):
    ids, targets = (torch.randint(hand_gpt.vocabulary, (BATCH, hand_gpt.LENGTH)).cuda() for _ in range(2))
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = hand_gpt.Gpt().cuda().to(torch.bfloat16 if half else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=half)
for step in range(4):
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    if step == 0:
        with torch.no_grad():
            model.eval()
            for _ in range(2):
                loss_of(model).item()
            model.train()
values = {"current": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
print(json.dumps({"label": sys.argv[1]} | values))
