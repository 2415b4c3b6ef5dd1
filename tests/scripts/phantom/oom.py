"""Checks that an OOM on the simulated GPU comes from torch, after torch's own retries, at the given capacity.

Run with MEMTRACE_PHANTOM=mem=8g,cc=8.0,context=512m.
"""

import torch

GIB = 1 << 30
free, total = torch.cuda.mem_get_info()
assert (free, total) == (8 * GIB - (512 << 20), 8 * GIB), (free, total)
assert torch.cuda.get_device_capability() == (8, 0)

blocks = []
try:
    while True:
        blocks.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    text = str(error)
print(text)
assert len(blocks) == 7, len(blocks)
assert text.startswith(
    "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 8.00 GiB"
), text
assert "this process has 7.50 GiB memory in use" in text, text
assert "512.00 MiB is free" in text and "Of the allocated memory 7.00 GiB is allocated by PyTorch" in text, (
    text
)
stats = torch.cuda.memory_stats()
assert stats["num_ooms"] == 1 and stats["num_alloc_retries"] == 1

# Exact to the page: the remaining memory can be allocated, one page more cannot.
blocks.append(torch.empty(512 << 20, dtype=torch.uint8, device="cuda"))
assert torch.cuda.mem_get_info()[0] == 0
try:
    torch.empty(1, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("one byte fitted into a full card")

# After some frees, the same request succeeds: torch releases a cached block that is too large and allocates a
# new one.
del blocks[:4]
whole = torch.empty(3 * GIB + 1, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_stats()["num_alloc_retries"] == 3
del whole, blocks
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0 and torch.cuda.mem_get_info()[0] == free

# torch itself enforces a memory fraction.
torch.cuda.set_per_process_memory_fraction(0.25)
try:
    torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "2.00 GiB allowed" in str(error), error
else:
    raise AssertionError("more than the fraction fitted")
print("ok")
