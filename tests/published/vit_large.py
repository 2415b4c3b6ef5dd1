"""Memory that is reserved after fine-tuning torchvision's ViT-L-16, change by change.

The source's torch is a nightly of June 2023; 2.1.2 differs in Adam, whose older rule is written out.

vit_large.py STEP    # original fabric mixed bfloat16 batch accumulation sgd
"""

import json
import sys

import lightning
import torch
from harness import older
from torch.nn import functional as F
from torchvision.models import vit_l_16

STEPS = ["original", "fabric", "mixed", "bfloat16", "batch", "accumulation", "sgd"]
older.second_intermediate_of_adam()
step = STEPS.index(sys.argv[1])
precision = ["32-true", "32-true", "16-mixed"][step] if step < 3 else "bf16-true"
size, accumulated = (64, 1) if step < 4 else (16, 1) if step == 4 else (4, 4)

model = vit_l_16(weights=None)
model.heads.head = torch.nn.Linear(1024, 10)
if sys.argv[1] == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
fabric = lightning.Fabric(accelerator="cuda", devices=1, precision=precision)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)


def batch():
    return torch.rand(size, 3, 224, 224).cuda(), torch.randint(10, (size,)).cuda()


for index in range(3 * accumulated):
    model.train()
    features, targets = batch()
    logits = model(features)
    loss = F.cross_entropy(logits, targets) / accumulated
    if accumulated == 1:
        optimizer.zero_grad()
    fabric.backward(loss)
    if index % accumulated == 0:
        optimizer.step()
        if accumulated > 1:
            optimizer.zero_grad()
model.eval()
with torch.no_grad():
    for _ in range(2):
        features, _ = batch()
        outputs = model(features)
print(json.dumps({"label": sys.argv[1], "reserved": torch.cuda.max_memory_reserved()}))
