"""Two linear layers and AdamW: the memory after three steps can be computed by hand."""

import json

import torch

model = torch.nn.Sequential(
    torch.nn.Linear(1024, 4096, bias=False), torch.nn.GELU(), torch.nn.Linear(4096, 1024, bias=False)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
optimizer.zero_grad()
torch.cuda.synchronize()
print(json.dumps({"current": torch.cuda.memory_allocated()}))
