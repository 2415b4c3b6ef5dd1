"""Results of ops on known values are known on the simulated GPU, as PyTorch's CPU kernels compute them."""

import torch
from torch.nn.functional import one_hot

device = torch.device("cuda")


def on_both(function, *tensors):
    """Compares the values of a function of known tensors on the simulated GPU with those on the CPU."""
    wanted, found = function(*tensors), function(*(tensor.to(device) for tensor in tensors))
    both = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
    for one, other in both:
        assert other.is_cuda and other.tolist() == one.tolist(), (other.tolist(), one.tolist())


numbers, others, places = torch.tensor([5, 3, 2]), torch.tensor([1, 2, 3]), torch.tensor([2, 0, 2])
table = torch.arange(12).view(3, 4)
for function in (
    lambda x: x.repeat_interleave(x),
    lambda x: (x > 2).sum(),
    lambda x: torch.where(x > 2, x, 0),
    lambda x: x.clamp(max=3),
    lambda x: x.float() / 2,
    lambda x: (x.half() + 1, x.bfloat16() * 2, x.double().sqrt(), x.to(torch.uint8)),
    lambda x: tuple(x.sort()),
    lambda x: x.argsort(descending=True),
    lambda x: (x.cumsum(0), x.diff(), x.flip(0), x.roll(1), x.prod(), x.max(), x.argmin(), x.float().mean()),
    lambda x: (one_hot(x), torch.bincount(x), (x > 2).nonzero(), x[x > 2]),
    lambda x: tuple(torch.unique(torch.cat([x, x]), return_counts=True)),
    lambda x: torch.unique_consecutive(torch.tensor([1, 1, 3], device=x.device)),
    lambda x: tuple(x.float().topk(2)),
    lambda x: (torch.isfinite(x * 0.1), x.float().softmax(0) > 0.5, x % 2, x // 2, x << 1, -x, x == x.max()),
    lambda x: (
        torch.arange(3, device=x.device),
        torch.eye(2, device=x.device),
        torch.full((2,), 7.5, device=x.device),
    ),
    lambda x: (torch.linspace(0, 1, 3, device=x.device), torch.ones(3, 3, device=x.device).tril()),
    lambda x: (x.expand(2, 3).T.contiguous(), x.view(3, 1) * x, x[1:], x[::2] + 1, torch.stack([x, x])),
):
    on_both(function, numbers)
on_both(
    lambda x, y: (torch.cat([x, y]), torch.searchsorted(y, x), torch.maximum(x, y), x.lt(y)), numbers, others
)
on_both(lambda x, y: x[y - 1], numbers, others)
on_both(lambda x, y: (x.gather(0, y), x.index_select(0, y), torch.isin(x, y)), numbers, places)
on_both(
    lambda x, y: torch.zeros(4, dtype=torch.int64, device=x.device).scatter_add_(0, y, x), numbers, places
)
on_both(
    lambda x, y: (x[y], x[y, y], x[:, 1], x[1:, ::2].sum(0), (x % 3 == 0).any(1), (x > 3).all(0)),
    table,
    places,
)

# An op in place changes only what it writes, also through a view and over a list.
mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
mask[:, 0] = True
mask[1, 2:] = True
assert (~mask).tolist() == [[False, True, True, True], [False, True, False, False], [False, True, True, True]]
assert int(mask.sum()) == 5
step = torch.tensor(3.0, device=device)
step += 1
assert step.item() == 4
steps = [torch.tensor(float(index), device=device) for index in range(3)]
torch._foreach_add_(steps, 1)
assert [step.item() for step in steps] == [1, 2, 3]
kept = torch.arange(6, device=device)
kept[2:4] = torch.randint(9, (2,), device=device)
assert (kept[:2] + kept[4:]).tolist() == [4, 6]
whole = kept.clone()
whole[kept > 3] = 0
assert whole[4:].tolist() == [0, 0]

# A list may contain tensors without elements.
rows = [torch.empty(2, 0, dtype=torch.int64, device=device), torch.tensor([[1, 2], [3, 4]], device=device)]
torch._foreach_add_(rows, 1)
assert [row.tolist() for row in rows] == [[[], []], [[2, 3], [4, 5]]]

# A resumed optimizer has its step counts on the GPU.
weight = torch.nn.Parameter(torch.randn(4, 4, device=device))
optimizer = torch.optim.AdamW([weight])
state = {"step": torch.tensor(5.0, device=device), "exp_avg": weight * 0, "exp_avg_sq": weight * 0}
optimizer.state[weight] = {name: value.detach() for name, value in state.items()}
for step in range(3):
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["step"].item() == 6 + step

# transformers checks whether a batch is packed; here with as many positions as a long context has.
for positions in (16_384, 1 << 19):
    position = torch.arange(positions, device=device).expand(2, positions)
    packed = torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1
    assert bool((packed.cumsum(-1)[:, -1] == 0).all())
    assert int((position % 2 == 0).sum()) == positions

# Values that no kernel computed stay unknown, whatever known values they meet.
unknown = torch.randn(3, device=device) + numbers.to(device)
assert unknown.tolist() == [0, 0, 0]
assert (torch.rand_like(step_like := torch.ones(3, device=device)) + step_like).tolist() == [0, 0, 0]

# Computing known values on the CPU takes no random number, no gradient and no extra device memory.
torch.manual_seed(3)
before, made = torch.random.get_rng_state(), torch.cuda.memory_stats()["allocation.all.allocated"]
total = numbers.to(device).float().requires_grad_().add(1)
assert torch.equal(torch.random.get_rng_state(), before)
assert torch.cuda.memory_stats()["allocation.all.allocated"] == made + 3
assert total.requires_grad and total.tolist() == [6, 4, 3]
threads = torch.get_num_threads()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    total.detach().mul(2)
assert [event.name for event in profile.events() if event.name.startswith("aten")] == [
    "aten::detach",
    "aten::mul",
]
assert torch.get_num_threads() == threads
with torch.inference_mode():
    assert (numbers.to(device) + 1).tolist() == [6, 4, 3]


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the ops that a mode sees."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        seen.append(function.name())
        return function(*arguments, **(named or {}))


seen, ready = [], numbers.to(device)
with Names():
    doubled = ready * 2
assert seen == ["aten::mul.Tensor"] and doubled.tolist() == [10, 6, 4], seen
assert torch.vmap(lambda row: row + 1)(table.to(device)).tolist() == (table + 1).tolist()

# The result of an op that the CPU refuses is unknown, and so is the result of a capture and its replay.
try:
    ready[torch.tensor([7], device=device)]
except RuntimeError as error:
    raise AssertionError("no kernel checks an index here") from error
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    captured = ready + 1
graph.replay()
assert captured.tolist() == [0, 0, 0]

# Results that the caller passes (`out=`) are known, too, and an index after `:`.
row, flags = torch.tensor([0, 1, 1, 2], device=device), torch.tensor([True, False, True], device=device)
picked, sums = row.new_empty(4, dtype=torch.bool), row.new_zeros(5)
torch.index_select(flags, 0, row, out=picked)
torch.cumsum(row, 0, out=sums[1:])
assert picked.tolist() == [True, False, False, True] and sums.tolist() == [0, 0, 1, 2, 4]
assert torch.eq(row, 1, out=row.new_empty(4, dtype=torch.bool)).tolist() == [False, True, True, False]
assert torch.add(row, 2, out=row.new_empty(4)).tolist() == [2, 3, 3, 4]
assert row[None][:, [3, 0]].tolist() == [[2, 0]]
# The size of a count does not depend on the names of the kernels that count.
pairs = torch.tensor([[1, 2], [1, 2], [3, 4]], device=device)
different, places, counts = pairs.unique(dim=0, return_inverse=True, return_counts=True)
assert (different.tolist(), places.tolist(), counts.tolist()) == ([[1, 2], [3, 4]], [0, 0, 1], [2, 1])
different, places, counts = torch.rand(50, 3, device=device).unique(
    dim=0, return_inverse=True, return_counts=True
)
assert (different.shape, places.shape, counts.shape) == ((50, 3), (50,), (50,))
print("ok")
