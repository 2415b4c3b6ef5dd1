"""A kernel over a list of tensors makes only these unknown, not blocks whose old addresses are in the list.

PyTorch's `_foreach` functions and fused optimizers have room for more tensors than a launch uses.
"""

import torch

# Test the kernels alone: with record functions, the results of ops on known values would be known.
torch._C._autograd._enable_record_function(False)
device = torch.device("cuda")


def known(*shape):
    """Returns a tensor of sevens whose values the device knows."""
    return torch.full(shape, 7, device=device, dtype=torch.float32)


def stays(tensors):
    for tensor in tensors:
        assert (tensor.cpu() == 7).all(), tensor


def is_unknown(tensors):
    for tensor in tensors:
        assert (tensor.cpu() == 0).all(), tensor


def after(first, second):
    """Runs `first` on many tensors, then `second` on few: the list still has the addresses of the many."""
    many = [known(10) for _ in range(100)]
    first(many)
    addresses = {tensor.data_ptr() for tensor in many}
    del many
    # The allocator hands out the same blocks again.
    others = [known(10) for _ in range(100)]
    assert any(tensor.data_ptr() in addresses for tensor in others)
    few = [known(10) for _ in range(3)]
    second(few)
    is_unknown(few)
    stays(others)


def scalars(tensors, number=2.0):
    torch._foreach_mul_(tensors, [number] * len(tensors))


def adam(tensors):
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True, capturable=True)
    optimizer.step()
    assert all(optimizer.state[parameter]["step"].is_cuda for parameter in parameters)


for function in (
    lambda tensors: torch._foreach_mul_(tensors, 2.0),
    scalars,
    lambda tensors: torch._foreach_add_(tensors, tensors),
    lambda tensors: torch._foreach_addcmul_(tensors, tensors, tensors, [2.0] * len(tensors)),
    lambda tensors: torch._foreach_lerp_(tensors, tensors, tensors),
    adam,
):
    after(function, function)

# `_foreach_norm` gets the addresses of its results in a second list.
torch._foreach_norm([known(10) for _ in range(100)])
others = [known(10) for _ in range(300)]
norms = torch._foreach_norm([known(10) for _ in range(3)])
stays(others)
is_unknown(norms)

# Lists of one tensor, of more tensors than a launch takes, and tensors of more chunks than a launch takes.
for sizes in ([10], [10] * 320, [0, 10, 0], [330 * 65536 + 5, 10], [10] + [65536 * 3] * 120):
    tensors = [known(size) for size in sizes]
    torch._foreach_mul_(tensors, 3.0)
    is_unknown(tensors)
    stays(others)

# A list that also has complex scalars has room for fewer tensors.
for dtype in (torch.complex64, torch.complex128):
    tensors = [torch.full((10,), 7, device=device, dtype=dtype) for _ in range(80)]
    torch._foreach_mul_(tensors, [2j] * 80)
    is_unknown(tensors)
    stays(others)

# Capture a kernel over a list, then replay it: only the tensors of the list become unknown.
tensors = [known(10) for _ in range(5)]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch._foreach_mul_(tensors, 2.0)
for tensor in tensors:
    tensor.fill_(7)
graph.replay()
is_unknown(tensors)
stays(others)

# Training that reads from its input the number of graphs in a batch, in each step, as graph networks do.
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(20)]).to(device)
optimizer = torch.optim.Adam(model.parameters(), foreach=True)
for step in range(6):
    batch = torch.arange(4 + step).repeat_interleave(3).to(device)
    pooled = torch.zeros(int(batch.max()) + 1, 16, device=device)
    assert pooled.shape[0] == 4 + step, (step, pooled.shape)
    pooled = pooled.index_add(0, batch, model(torch.randn(batch.numel(), 16, device=device)))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(pooled, torch.randn_like(pooled)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert int(batch.max()) + 1 == 4 + step
print("ok")
