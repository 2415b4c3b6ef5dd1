"""Checks the caching allocator's settings on the simulated GPU; run with one of them set."""

import os
import re
import sys

import torch

MIB = 1 << 20
setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free


torch.cuda.init()
start = used()


def tensor(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def default():
    _held = tensor(30 * MIB)
    assert used() - start == torch.cuda.memory_reserved() == 30 * MIB


def expandable():
    a = tensor(30 * MIB)
    segments = torch.cuda.memory_snapshot()
    assert segments[0]["is_expandable"], segments[0]
    assert used() - start == torch.cuda.memory_reserved() == 40 * MIB, (
        used() - start,
        torch.cuda.memory_reserved(),
    )
    # The segment grows in place: one segment, one range of addresses.
    b = tensor(50 * MIB)
    assert len(torch.cuda.memory_snapshot()) == 1
    assert torch.tensor([1, 2, 3], device="cuda").tolist() == [1, 2, 3]
    address = a.data_ptr()
    del a, b
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert used() - start == torch.cuda.memory_reserved() <= 2 * MIB, (
        used() - start,
        torch.cuda.memory_reserved(),
    )
    assert tensor(30 * MIB).data_ptr() == address
    # Filled to the last page; the next request fails.
    blocks = []
    try:
        while True:
            blocks.append(tensor(512 * MIB))
    except torch.OutOfMemoryError:
        pass
    assert torch.cuda.mem_get_info()[0] < 600 * MIB
    del blocks


def max_split():
    large = tensor(200 * MIB)
    del large
    _held = tensor(60 * MIB)
    # A block above the limit is not split: it stays whole in the cache, and a new one is allocated.
    assert torch.cuda.memory_reserved() == 260 * MIB, torch.cuda.memory_reserved()


def roundup():
    _held = torch.empty(4097 * 8, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 4608 * 8, torch.cuda.memory_allocated()


def backend_async():
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    _held, b = tensor(10 * MIB), tensor(50 * MIB)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 60 * MIB, stats["allocated_bytes.all.current"]
    assert stats["reserved_bytes.all.current"] == used() - start >= 60 * MIB
    assert stats["allocated_bytes.all.peak"] == 60 * MIB
    del b
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    # The pool keeps its memory until it is trimmed.
    assert (
        stats["allocated_bytes.all.current"] == 10 * MIB and stats["reserved_bytes.all.current"] >= 60 * MIB
    )
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 60 * MIB, torch.cuda.memory_reserved()
    model = torch.nn.Linear(512, 512).cuda()
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    try:
        _held = [tensor(1024 * MIB) for _ in range(1000)]
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0])
    else:
        raise AssertionError("a thousand GiB fitted")


def no_caching():
    a, b = tensor(1000), tensor(3 * MIB)
    # The first buffer shares a page with others of its kind, the second has two pages of its own.
    assert used() - start == 2 * MIB + 4 * MIB, used() - start
    assert torch.cuda.memory_stats().get("reserved_bytes.all.current", 0) == 0
    del a, b
    torch.cuda.synchronize()
    assert used() == start


kinds = {
    r"expandable_segments:True": expandable, r"max_split_size_mb": max_split,
    r"roundup_power2": roundup, r"cudaMallocAsync": backend_async,
}  # fmt: skip
chosen = [function for pattern, function in kinds.items() if re.search(pattern, setting)]
if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
    chosen = [no_caching]
for function in chosen or [default]:
    function()
    print("ok", function.__name__)
sys.exit(0)
