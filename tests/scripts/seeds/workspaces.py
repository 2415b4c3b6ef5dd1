"""A layer whose products take workspaces of cuBLAS and cuBLASLt. Prints the bytes of the workspaces."""

import torch
from torch import nn

model = nn.Linear(512, 512).cuda()
data = torch.ones(512, 512, device="cuda")
for _ in range(2):
    result = model(data).sum()
    result.backward()
    model.zero_grad()
del result
torch.cuda.synchronize()
before = torch.cuda.memory_allocated()
torch._C._cuda_clearCublasWorkspaces()
print(before - torch.cuda.memory_allocated())
