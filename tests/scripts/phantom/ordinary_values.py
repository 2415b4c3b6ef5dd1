"""Values that no kernel computed are ordinary on the simulated GPU: checks pass, however many there are."""

import torch

device = torch.device("cuda")

for shape in ((), (1,), (1, 1), (2,), (7, 3)):
    loss = torch.randn(shape, device=device)
    assert torch.isfinite(loss).all() and not torch.isnan(loss).any() and not torch.isinf(loss).any(), shape
    # Checks that all values are in a support, and that none is out of it.
    assert (loss >= 0).all() and not (loss < -5).any() and (loss > 0).all(), shape
    assert torch._is_all_true(loss <= 1), shape
    # Two tensors differ, and so do a value and a number.
    assert not (loss == torch.randn(shape, device=device)).all() and not torch.equal(loss, loss * 2), shape
    assert not (loss == 3).all() and not (loss == 3).any() and (loss != 3).all() and (loss != 3).any(), shape
scalar = torch.rand((), device=device)
assert bool(torch.isfinite(scalar)) and not bool(torch.isnan(scalar)) and bool(torch.isfinite(scalar + 1))
assert bool(torch.isfinite(torch.tensor(0.1, device=device)))
assert not torch.tensor(float("nan"), device=device).isfinite()
batch = torch.rand(4, 3, device=device)
assert (batch >= 0).all(-1).tolist() == [True] * 4 and (batch < 0).any(dim=-1).tolist() == [False] * 4

# What is known of some flags decides.
flags = torch.rand(4, device=device) > 0.5
flags[1] = False
assert not flags.all()
flags[2] = True
assert flags.any()
yes, no = torch.ones(4, dtype=torch.bool, device=device), torch.zeros(4, dtype=torch.bool, device=device)
assert (
    ((batch[:, 0] > 0) | yes).all()
    and not ((batch[:, 0] > 0) & no).any()
    and not ((batch[:, 0] > 0) & no).all()
)

# A loop that generates tokens ends at its length and not before, in the words of transformers and of others.
for rows in (1, 2):
    for criterion in (
        lambda ids: ids[:, -1] == 7,
        lambda ids: torch.isin(ids[:, -1], torch.tensor([7, 8], device=device)),
    ):
        ids, unfinished = (
            torch.zeros(rows, 1, dtype=torch.long, device=device),
            torch.ones(rows, dtype=torch.long, device=device),
        )
        while True:
            token = torch.randn(rows, 100, device=device).argmax(-1)
            ids = torch.cat([ids, (token * unfinished + 9 * (1 - unfinished))[:, None]], dim=1)
            done = torch.full((rows,), False, device=device, dtype=torch.bool)
            done = done | torch.full((rows,), ids.shape[1] >= 12, device=device, dtype=torch.bool)
            done = done | criterion(ids)
            unfinished = unfinished & ~done
            if unfinished.max() == 0:
                break
        assert ids.shape[1] == 12, ids.shape
    finished, length = torch.zeros(rows, dtype=torch.bool, device=device), 0
    while length < 12 and not finished.all():
        finished |= torch.randn(rows, 100, device=device).argmax(-1) == 7
        length += 1
    assert length == 12
# A router gives each of its experts the same share of the tokens.
tokens, experts, chosen = 64, 8, 2
logits = torch.nn.Linear(16, experts, device=device)(torch.randn(tokens, 16, device=device))
weights, places = logits.softmax(-1).topk(chosen, dim=-1)
assert all(len(set(row)) == chosen for row in places.tolist())
mask = torch.nn.functional.one_hot(places, num_classes=experts).permute(2, 1, 0)
for expert in range(experts):
    _, rows = torch.where(mask[expert])
    assert len(rows) == tokens * chosen // experts, (expert, len(rows))
assert torch.bincount(places.flatten(), minlength=experts).tolist() == [16] * experts
print("ok")
