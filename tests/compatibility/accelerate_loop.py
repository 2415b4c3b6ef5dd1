"""A training loop with accelerate: mixed precision, gradient accumulation, clipping."""

import torch
from accelerate import Accelerator
from peaks import print_peak
from torch import nn

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader([torch.randn(512) for _ in range(64)], batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print("ranks", accelerator.num_processes)
print_peak()
accelerator.end_training()
