"""Known small values stay known on the simulated GPU as long as nothing of unknown effect ran."""

import torch
from torch.testing import assert_close

# A kernel without an address among its arguments writes nothing.
known = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
torch.cuda._sleep(1_000_000)
assert known.tolist() == [1, 2, 3, 4]
copied = torch.empty(4, device="cuda")
torch.cuda._sleep(1_000_000)
copied.copy_(known)
assert copied.tolist() == [1, 2, 3, 4]

# Known values of any type are compared element by element.
for dtype in (
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
):
    ones, more = torch.ones(100, dtype=dtype, device="cuda"), torch.ones(100, dtype=dtype, device="cuda")
    zeros = torch.zeros(100, dtype=dtype, device="cuda")
    assert (ones == more).all().item() and not (ones == zeros).any().item(), dtype
    assert (ones != zeros).all().item() and not (ones != more).any().item(), dtype
    assert torch.equal(ones, more) and not torch.equal(ones, zeros), dtype
assert_close(torch.full((10,), 10, device="cuda"), torch.full((10,), 10, device="cuda"), rtol=0, atol=0)
assert_close(torch.full((10,), 2.5, device="cuda"), torch.full((10,), 2.5, device="cuda"))
flags = torch.tensor([True, False, True, False], device="cuda")
others = torch.tensor([True, True, False, False], device="cuda")
assert (flags | others).tolist() == [True, True, True, False]
assert (flags & others).tolist() == [True, False, False, False]
# A comparison of broadcast tensors writes its output and nothing else.
lengths, positions = torch.tensor([200, 120], device="cuda"), torch.arange(200, device="cuda")
for compare in (torch.ge, torch.lt, torch.eq, torch.ne):
    for step in range(3):
        mask = compare(positions.expand(2, 200), lengths.unsqueeze(1))
        assert mask.shape == (2, 200) and int(lengths.max()) == 200 and lengths.tolist() == [200, 120], step
    out = torch.zeros(2, 400, dtype=torch.bool, device="cuda")
    compare(positions.expand(2, 200), lengths.unsqueeze(1), out=out[:, ::2])
    assert lengths.tolist() == [200, 120]
# NaN is equal to nothing, not even to NaN.
nan = torch.tensor([float("nan")], device="cuda")
assert not (nan == torch.tensor([float("nan")], device="cuda")).item()
# Values that no kernel computed are ordinary: finite and not NaN, however many.
for count in (1, 2, 7, 300_000):
    unknown = torch.randn(count, device="cuda")
    assert torch.isfinite(unknown).all().item() and torch.isfinite(unknown.mean()).item(), count
    assert not torch.isnan(unknown).any().item() and not torch.isinf(unknown).any().item(), count
print("ok")
