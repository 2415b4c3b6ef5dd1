"""A kernel of unknown effect makes unknown what its arguments reach, and no other memory."""

import torch

# Test the kernels alone: with record functions, the results of ops on known values would be known.
torch._C._autograd._enable_record_function(False)
device = torch.device("cuda")


def known(*shape):
    """Returns a tensor of sevens whose values the device knows."""
    return torch.full(shape, 7, device=device, dtype=torch.float32)


def stays(tensor):
    assert (tensor.cpu() == 7).all(), tensor


def is_unknown(tensor):
    assert (tensor.cpu() == 0).all(), tensor


# Kernels that do not get a tensor, or that only read it, keep its values.
x = torch.randn(64, 64, device=device)
batch = torch.tensor([0, 0, 1, 2, 5], device=device)
padded = torch.tensor([[1, 1], [1, 0]], device=device)
embedding = torch.nn.Embedding(10, 64, device=device)
for _ in range(3):
    y = torch.softmax(x @ x + embedding(batch).sum(), dim=1)
    y = torch.nn.functional.layer_norm(y[batch], (64,)) @ x
    torch.zeros(6, 64, device=device).index_add_(0, batch, y)
    torch.zeros(6, 64, device=device).scatter_add_(0, batch[:, None].expand(5, 64), y)
    torch.nn.functional.cross_entropy(y, batch)
    assert int(batch.max()) + 1 == 6
    assert batch.tolist() == [0, 0, 1, 2, 5]
    assert not torch.all(padded == 1).item() and torch.all(torch.ones_like(padded) == 1).item()
    batch[::2].clone()
    assert batch.tolist() == [0, 0, 1, 2, 5]

# A write through a view, at an offset, or in place makes the whole tensor unknown.
for write in (
    lambda t: torch.cumsum(x[0], 0, out=t[64:128]),
    lambda t: torch.mm(x, x, out=t[4096:].view(64, 64)),
    lambda t: t[5:69].exponential_(),
    lambda t: t[3:].cumsum_(0),
):
    tensor, other = known(8192), known(8192)
    write(tensor)
    is_unknown(tensor)
    stays(other)
tensor = known(128)
tensor.uniform_()
is_unknown(tensor)
tensor = known(16, 16)
torch.mm(x[:16], x[:, :16], out=tensor)
is_unknown(tensor)
tensor = known(3, 16, 16)
torch.bmm(x.view(1, 64, 64)[:, :16].expand(3, 16, 64), x[:, :16].expand(3, 64, 16), out=tensor)
is_unknown(tensor)

# Memory that the allocator hands out again has no known values, in a block of the same or of another size.
for size in (64, 32, 100):
    old = known(64)
    address = old.data_ptr()
    del old
    new = torch.empty(size, device=device)
    assert new.data_ptr() != address or (new.cpu() == 0).all()

# Copies and fills on other streams, before and after a kernel.
side = torch.cuda.Stream()
tensor = known(64)
with torch.cuda.stream(side):
    tensor.copy_(torch.arange(64.0).pin_memory(), non_blocking=True)
    torch.rand(64, out=x[0])
assert tensor.tolist() == list(range(64))
with torch.cuda.stream(side):
    tensor.zero_()
    torch.rand(64, device=device)
assert tensor.tolist() == [0] * 64
with torch.cuda.stream(side):
    torch.rand(64, out=tensor)
is_unknown(tensor)

# This kernel loads the addresses to which it writes from memory; the host copied them there.
parts = [known(2, 40), known(2, 24)]
bystander = known(64)
torch.split_with_sizes_copy(torch.randn(2, 64, device=device), [40, 24], dim=1, out=parts)
for part in parts:
    is_unknown(part)
stays(bystander)

# Batched functions of cuBLAS get an array of addresses, which an `arange` computed on the device.
matrices = torch.full((3, 4, 4), 7.0, device=device)
torch.linalg.lu_factor(
    torch.randn(3, 4, 4, device=device), out=(matrices, torch.empty(0, dtype=torch.int32, device=device))
)
assert not (matrices.cpu() == 7).all()

# At each replay a graph writes to the arguments that its kernels had at the capture.
static, kept, product = known(64), known(64), known(64, 64)
scratch = torch.randn(64, device=device)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    temporary = torch.sigmoid(scratch.cumsum(0))
    torch.cumsum(temporary, 0, out=static)
    torch.mm(x, x, out=product)  # by cuBLAS, on the stream of its handle
for _ in range(2):
    static.fill_(7)
    product.fill_(7)
    stays(static)
    stays(product)
    graph.replay()
    is_unknown(static)
    is_unknown(product)
    stays(kept)

# Foreach kernels get the addresses of all their tensors.
tensors = [known(10) for _ in range(50)]
torch._foreach_mul_(tensors, 3.0)
for tensor in tensors:
    is_unknown(tensor)
stays(kept)

# A mask that the host reads follows the assumption about dynamic sizes, like a mask on the device.
mask = torch.randn(4, 25, device=device) > 0
full = mask.cpu()
assert full.all() and full.clone().sum().item() == mask.nonzero().shape[0] == 100, full.sum()
assert mask.clone().cpu().all() and mask.int().bool().cpu().all()
print("ok")
