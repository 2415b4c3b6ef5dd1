"""Answers about values that no kernel computed agree with each other on the simulated GPU."""

import os

import torch

most = {"full": 1.0, "half": 0.5, "empty": 0.0}[os.environ.get("MEMTRACE_PHANTOM_DYNAMIC", "full")]

# An unknown value is not NaN, and equals itself.
for shape in ((), (1,), (100,)):
    x = torch.randn(shape, device="cuda")
    assert not torch.isnan(x).any() and (~torch.isnan(x)).all() and (x == x).all()
    assert x[~torch.isnan(x)].numel() == x.numel() and x[torch.isnan(x)].numel() == 0, shape
nan = torch.tensor([float("nan"), 1.0], device="cuda")
assert torch.isnan(nan).tolist() == [True, False] and len(nan[~torch.isnan(nan)]) == 1

# A selection by a known mask has the size that it has on a card, whatever is assumed about unknown masks.
known = torch.tensor([True, False, True, True], device="cuda")
values = torch.randn(4, device="cuda")
assert len(values[known]) == 3 and len(values[~known]) == 1 and len(known.nonzero()) == 3
assert len(torch.tensor([0, 3, 0, -1], device="cuda").nonzero()) == 2

# A mask and its opposite together select each element once. The first that is read gets the assumed size.
values = torch.randn(1000, device="cuda")
for first in (False, True):
    mask = values > 0
    opposite = ~mask
    pair = (opposite, mask) if first else (mask, opposite)
    asked, other = (len(values[flags]) for flags in pair)
    assert (asked, other) == (1000 * most, 1000 - 1000 * most), (asked, other)
    copied = opposite.clone()
    assert copied.tolist() == opposite.tolist() == [not flag for flag in mask.tolist()]
    # The answer holds until the flags change.
    torch.gt(values, 0, out=mask)
    assert len(values[opposite]) == (asked if first else other)

# A single flag and its opposite have different values.
flag = torch.rand((), device="cuda") > 2
assert bool(flag) != bool(~flag) and bool(flag) == bool(flag)
flag = torch.rand(1, device="cuda") > 2
assert bool(torch.logical_not(flag)) != bool(flag)
even = torch.equal(values, torch.randn(1000, device="cuda"))
assert not even

# A number that the program has read keeps that value in later answers.
count = torch.randint(0, 5, (1,), device="cuda")
assert count.item() == 0 and (count == 0).all() and not (count > 0).any()
count.random_()
assert not (count == 0).any() or count.item() == 0

# Unknown indices select values in order, from the first to the last, so the largest can be used as a size.
graphs = torch.arange(16).repeat_interleave(50).cuda()
order = torch.randn(800, device="cuda").argsort()
for chosen in (order, order[:400], order[::2], order.view(40, 20)):
    picked = graphs[chosen]
    assert picked.shape == chosen.shape and int(picked.max()) == 15 and int(picked.min()) == 0
    assert picked.flatten().tolist() == sorted(picked.flatten().tolist())
assert graphs[order[:1]].item() == 0
assert graphs[torch.tensor([799, 0, -1], device="cuda")].tolist() == [15, 0, 15]
three = torch.tensor([2, 0, 1], device="cuda")
numbers = torch.tensor([7, 8, 9], device="cuda")
assert torch.zeros_like(three).scatter_(0, three, numbers).tolist() == [8, 9, 7]
table = torch.arange(12).view(4, 3).cuda()
assert table[torch.tensor([2, 0], device="cuda")].tolist() == [[6, 7, 8], [0, 1, 2]]
assert table[:, torch.tensor([2], device="cuda")].tolist() == [[2], [5], [8], [11]]
picked = torch.gather(graphs, 0, order)
assert int(picked.max()) == 15 and picked.tolist() == graphs.tolist()
target = torch.arange(800, device="cuda").scatter_(0, order, picked)
assert int(target.max()) == int(picked.max()) == 15
assert int(torch.zeros(900, dtype=torch.long, device="cuda").scatter_(0, order, picked).max()) == 0
assert int(graphs.max()) == 15
unknown = torch.randn(800, device="cuda")[order]
assert unknown.tolist() == [0.0] * 800
print("ok")
