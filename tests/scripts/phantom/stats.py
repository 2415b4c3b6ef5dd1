"""Trains a little and prints torch's statistics, to compare runs.

Reads three values that no kernel computed.
"""

import json

import torch
import torch.nn as nn

layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    tokens = torch.randint(0, 1000, (4, 64 + 32 * step)).cuda()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
stats = torch.cuda.memory_stats()
print(json.dumps({name: value for name, value in stats.items() if isinstance(value, int)}, sort_keys=True))
