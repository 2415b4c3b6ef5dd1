"""Checks sizes that depend on uncomputed values: MEMTRACE_PHANTOM_DYNAMIC sets them."""

import os

import torch

share = {"full": 1.0, "half": 0.5, "empty": 0.0}[os.environ.get("MEMTRACE_PHANTOM_DYNAMIC", "full")]
x = torch.randn(1000, device="cuda")
labels = torch.randint(0, 50, (1000,), device="cuda")
table = torch.randn(40, 50, device="cuda")
large = torch.randn(5_000_000, device="cuda")
found = {
    "nonzero": (x.nonzero(), 1000),
    "a mask": (x[x > 0], 1000),
    "a large mask": (large[large > 0], 5_000_000),
    "masked_select": (torch.masked_select(table, table > 0), 2000),
    "where": (torch.where(table > 0)[1], 2000),
    "unique": (torch.unique(labels), 1000),
    "unique of many": (torch.unique(large), 5_000_000),
    "unique with inverse and counts": (
        torch.unique(labels, return_inverse=True, return_counts=True)[0],
        1000,
    ),
    "unique along a dimension": (torch.unique(table, dim=0), 40),
    "unique_consecutive": (torch.unique_consecutive(labels), 1000),
    "to_sparse": (table.to_sparse().values(), 2000),
}
for name, (result, most) in found.items():
    assert len(result) == most * share, (name, len(result), most, share)
# A value that is not a size reads as zero without delay, and leaves nothing in reused memory.
assert x.sum().item() == 0.0 and not (x > 0).any() and torch.count_nonzero(x).item() == 0


class Experts(torch.nn.Module):
    """Sends each token to the experts that the router picked, as mixture-of-experts models do."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(64, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.routed = 0

    def forward(self, tokens):
        chosen = self.router(tokens).topk(2, dim=-1).indices
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == index)
            self.routed += len(rows)
            out.index_add_(0, rows, expert(tokens[rows]))
        return out


model = Experts().cuda()
model(torch.randn(128, 64, device="cuda")).sum().backward()
# The router's choice is even, whatever is assumed about other sizes.
assert model.routed == 2 * 128
print("ok")
