"""Unknown values behave like ordinary ones on the simulated GPU: checks pass, for any number of elements."""

import torch

device = torch.device("cuda")

for shape in ((), (1,), (1, 1), (2,), (7, 3)):
    loss = torch.randn(shape, device=device)
    assert torch.isfinite(loss).all() and not torch.isnan(loss).any() and not torch.isinf(loss).any(), shape
    # Checks pass, whether they test that all values are in a support or that none is outside of it.
    assert (loss >= 0).all() and not (loss < -5).any() and (loss > 0).all(), shape
    assert torch._is_all_true(loss <= 1), shape
    # Two tensors differ from each other, and a value differs from a number.
    assert not (loss == torch.randn(shape, device=device)).all() and not torch.equal(loss, loss * 2), shape
    assert not (loss == 3).all() and not (loss == 3).any() and (loss != 3).all() and (loss != 3).any(), shape
scalar = torch.rand((), device=device)
assert bool(torch.isfinite(scalar)) and not bool(torch.isnan(scalar)) and bool(torch.isfinite(scalar + 1))
assert bool(torch.isfinite(torch.tensor(0.1, device=device)))
assert not torch.tensor(float("nan"), device=device).isfinite()
batch = torch.rand(4, 3, device=device)
# A number equals itself, in a view with strides too.
column = torch.rand(4, 4, 3, device=device)[..., 2]
assert torch.distributions.constraints.real.check(column).all()
assert not (column != column).any() and not (column == column.mT.contiguous().mT).all()
# The minimum of flags is "all", the maximum is "any". No earlier test for equality decides, although its
# memory is used again.
assert (column.tril() == column).view(1, 16).min(-1)[0].tolist() == [True]
assert (column.diagonal() > 0).min(-1)[0].item() and not (column.diagonal() > 3).amax(-1).item()
assert torch.distributions.constraints.lower_cholesky.check(column).item()
assert (batch >= 0).all(-1).tolist() == [True] * 4 and (batch < 0).any(dim=-1).tolist() == [False] * 4

# Known flags decide the answer about all flags.
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

# A loop that generates tokens ends at its length limit, with the criteria of transformers and of others.
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
# The known part of generated tokens stays known, so the end marker after them is found (Whisper's decode).
tokens = torch.tensor([[5, 6]], device=device)
for _ in range(4):
    token = torch.randn(1, 100, device=device).argmax(-1)
    token[tokens[:, -1] == 9] = 9
    tokens = torch.cat([tokens, token[:, None]], dim=-1)
tokens = torch.nn.functional.pad(tokens, (0, 1), value=9)
assert tokens[0, :2].tolist() == [5, 6] and tokens[0, -1].item() == 9
assert (tokens[0] == 9).nonzero().tolist() == [[6]] and (tokens[:, :2] > 5).tolist() == [[False, True]]
assert (tokens != 9).sum().item() == 6 and tokens[:, [-1, 1]].tolist() == [[9, 6]]
# Without a known match, the number of matches is an assumption about sizes.
assert len((tokens[0] == 7).nonzero()) == 7 and not (tokens == 7).any()
# The candidates of a beam search are distinct.
for vocabulary in (50_257, 4 * 32_000):
    for row in torch.randn(2, vocabulary, device=device).topk(8).indices.tolist():
        assert len(set(row)) == 8 and min(row) >= 0 and max(row) < vocabulary
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
# The simulated GPU does not follow the elements of masks this large, but their counts are right: `chosen`
# experts per token.
tokens, experts, chosen = 16_384, 32, 4
places = torch.randn(tokens, experts, device=device).topk(chosen, dim=-1).indices
mask = torch.nn.functional.one_hot(places, num_classes=experts).permute(2, 1, 0)
assert mask.numel() > 1 << 20
hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
assert hit.flatten().tolist() == list(range(experts))
assert sum(len(torch.where(mask[expert])[1]) for expert in hit.flatten()) == tokens * chosen
routing = torch.zeros(tokens, 4 * experts, dtype=torch.int, device=device).scatter(1, places, 1).bool()
assert routing.numel() > 1 << 20
assert routing.sum(0).tolist() == [tokens * chosen // (4 * experts)] * 4 * experts
assert len(torch.randn(tokens, 4 * experts, device=device)[routing]) == tokens * chosen
routing.logical_not_()
assert len(routing.nonzero()) == routing.numel()

# A sample is in its support, for any number of elements.
distributions = torch.distributions
for shape in ((), (1,), (5,)):

    def positive(*more, shape=shape):
        return torch.rand((*shape, *more), device=device) + 0.5

    for distribution in (
        distributions.Categorical(logits=positive(4)),
        distributions.Bernoulli(logits=positive()),
        distributions.Binomial(10, logits=positive()),
        distributions.Poisson(positive()),
        distributions.Geometric(logits=positive()),
        distributions.NegativeBinomial(positive(), logits=positive()),
        distributions.OneHotCategorical(logits=positive(4)),
        distributions.MultivariateNormal(positive(3), positive(3, 3) @ positive(3, 3).mT),
        distributions.MultivariateNormal(
            positive(3), scale_tril=torch.linalg.cholesky(positive(3, 3) @ positive(3, 3).mT)
        ),
        distributions.Dirichlet(positive(4)),
        distributions.LKJCholesky(4, positive()),
    ):
        distribution.log_prob(distribution.sample())
action = distributions.Categorical(logits=torch.randn(1, 6, device=device)).sample()
assert 0 <= action.item() < 6
flips = torch.full((1000,), 0.25, device=device).bernoulli_(0.25)
assert flips.sum().item() == 250

# A sum is greater than its terms, as a solver expects of its time step. Otherwise unknown numbers have no
# order.
time, step = torch.tensor(0.0, device=device), torch.rand((), device=device)
assert time + step > time and not time + step <= time and time < time + step and time - step < time
assert not (time + step < time)

# A sampler for a detector takes 128 of the positive boxes and 384 of the negative ones, none twice.
labels = torch.randint(0, 5, (2000,), device=device)
positive, negative = torch.where(labels >= 1)[0], torch.where(labels == 0)[0]
taken = torch.zeros(2000, dtype=torch.uint8, device=device)
taken[positive[torch.randperm(positive.numel(), device=device)[:128]]] = 1
taken[negative[torch.randperm(negative.numel(), device=device)[:384]]] = 1
assert len(torch.where(taken)[0]) == 512
order = torch.randperm(100, device=device)
assert sorted(order.tolist()) == list(range(100))
assert torch.arange(100, device=device)[torch.rand(100, device=device) > 2].tolist() == list(range(100))
print("ok")
