"""A transformer with AMP, memory on several streams, and emptied caches.

Its snapshot goes to the file in argv[1]. argv[2] is the number of events that PyTorch keeps.
"""

import os
import sys

import torch
from torch import nn

torch.cuda.memory._record_memory_history(max_entries=int(sys.argv[2]))
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
net = nn.TransformerEncoder(layer, 3).cuda()
optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    tokens = torch.randn(8, 128 + 16 * step, 256, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(tokens).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.cuda.stream(torch.cuda.Stream()):
        side = torch.empty(1_500_000 + step * 700_000, device="cuda")
    side.record_stream(torch.cuda.current_stream())
    del side
    if step == 2:
        torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot(sys.argv[1])
# End here, so that the trace ends where the snapshot does.
os._exit(0)
