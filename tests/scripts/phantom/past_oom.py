"""Trains an MLP that needs more than a small card, and prints what PyTorch's allocator counted."""

import sys

import torch

DEPTH, WIDTH, BATCH = 12, 2048, 65536


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


model = Layers().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
    loss = model(torch.randn(BATCH, WIDTH, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
stats = torch.cuda.memory_stats()
print(stats["reserved_bytes.all.peak"], stats["num_alloc_retries"], stats["num_ooms"])
