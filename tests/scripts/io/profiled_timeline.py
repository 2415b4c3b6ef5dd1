"""Prints torch.profiler's memory profile of one training step, as JSON.

Step 3 is profiled. Its actions are printed in the profiler's order, with the address of each storage.
"""

import json

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(256, 32)
        # This layer runs twice in a forward, so its backward accumulates the gradient.
        self.again = nn.Linear(32, 32)

    def forward(self, x):
        x = self.head(self.act(self.norm(self.up(x))))
        # The backward of the power allocates temporaries that no op of the program returns; only autograd
        # sees them.
        return self.again(self.again(x) ** 3)


torch.manual_seed(0)
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
target = torch.zeros(16, dtype=torch.long, device="cuda")


def step():
    x = torch.randn(16, 64, device="cuda")
    loss = torch.nn.functional.cross_entropy(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for number in range(3):
    torch.cuda.nvtx.mark(f"step:{number}")
    step()
with torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
) as profiler:
    torch.cuda.nvtx.mark("step:3")
    step()
    torch.cuda.nvtx.mark("step:4")

profile = profiler._memory_profile()
rows = []
for time, action, (key, version), size in profile.timeline:
    if key.device.type != "cuda":
        continue
    storage = getattr(key, "storage", None)
    categories = [profile._categories.get(key, version + later) if storage else None for later in (0, 1)]
    before, after = [category.name if category else "Unknown" for category in categories]
    rows.append(
        {
            "time": time,
            "action": action.name,
            "addr": storage.ptr if storage else 0,
            "version": version,
            "bytes": size,
            "category": before,
            "category_after": after if action.name == "INCREMENT_VERSION" else before,
        }
    )
print(json.dumps(rows))
