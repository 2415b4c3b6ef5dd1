"""Copies, streams, events, threads, pinned memory, odd sizes and pointers on the simulated GPU.

Prints addresses and totals; they are the same in every run.
"""

import random
import threading

import torch

# Data that the program copied to the device and has not changed there is copied back intact.
numbers = torch.arange(1000)
assert torch.equal(numbers.cuda().cpu(), numbers)
assert torch.tensor(41, device="cuda").item() == 41
copied = torch.empty(1000, dtype=torch.int64, device="cuda").copy_(numbers)
assert copied[7].item() == 7 and copied[999:].cpu().item() == 999
grid = torch.arange(12).reshape(3, 4)
assert torch.equal(torch.empty(3, 4, dtype=torch.int64, device="cuda").copy_(grid).cpu(), grid)
# The result of a kernel reads as zero, finite and without delay.
assert (torch.randn(10, device="cuda") * 5).sum().item() == 0.0
assert torch.randn(1 << 20, device="cuda").cpu().abs().max().item() == 0.0
# A copy through numpy, without blocking.
assert torch.from_numpy(numbers.numpy()).to("cuda", non_blocking=True).tolist() == numbers.tolist()

del copied, grid
assert torch.cuda.memory_allocated() == 0

# Random odd sizes, freed out of order: the allocator's totals stay right.
random.seed(5)
live, total = [], 0
for _ in range(3000):
    if live and random.random() < 0.45:
        live.pop(random.randrange(len(live)))
    else:
        size = random.choice(
            [1, 511, 512, 513, 1 << 20, (1 << 20) + 1, 10 << 20, (10 << 20) - 1, random.randrange(1, 3 << 20)]
        )
        live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
rounded = sum((t.numel() + 511) // 512 * 512 for t in live)
stats = torch.cuda.memory_stats()
assert stats["requested_bytes.all.current"] == sum(t.numel() for t in live)
assert stats["allocated_bytes.all.current"] >= rounded
spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in live)
assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:])), "no two tensors overlap"
print(
    "live",
    len(live),
    stats["allocated_bytes.all.current"],
    stats["reserved_bytes.all.current"],
    hex(live[-1].data_ptr()),
)
del live
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_reserved() == 0

# Freed addresses are reused.
first = torch.empty(32 << 20, dtype=torch.uint8, device="cuda").data_ptr()
torch.cuda.empty_cache()
again = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
assert again.data_ptr() == first and first % (2 << 20) == 0

# An event is not complete at once; it completes when waited for, and after enough polls.
event = torch.cuda.Event(enable_timing=True)
assert event.query()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
for _ in range(100):
    again.add_(1)
end.record()
assert not end.query()
end.synchronize()
assert end.query() and start.elapsed_time(end) > 0
print("elapsed", start.elapsed_time(end))
end.record()
polls = 0
while not end.query():
    polls += 1
assert polls < 1000

# A block that another stream still uses stays active until that stream has finished with it.
side = torch.cuda.Stream()
block = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
with torch.cuda.stream(side):
    again.add_(1)
block.record_stream(side)
active = torch.cuda.memory_stats()["active_bytes.all.current"]
del block
assert torch.cuda.memory_stats()["active_bytes.all.current"] == active
torch.cuda.synchronize()
torch.empty(1, device="cuda")  # lets the allocator look at its events
assert torch.cuda.memory_stats()["active_bytes.all.current"] == active - (8 << 20)
assert side.query() and torch.cuda.current_stream().query()

# Host functions and pinned memory.
pinned = torch.arange(100).pin_memory()
assert pinned.is_pinned() and not numbers.is_pinned()
assert pinned.to("cuda", non_blocking=True).cpu().tolist() == list(range(100))
registered = torch.empty(4096, dtype=torch.uint8)
assert torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), 4096, 0) == 0
assert registered.is_pinned()
assert torch.cuda.cudart().cudaHostUnregister(registered.data_ptr()) == 0
assert not registered.is_pinned()


# Threads with a stream each; an error in one does not affect the others.
def work(seed):
    rng = random.Random(seed)
    with torch.cuda.stream(torch.cuda.Stream()):
        mine = [torch.randn(rng.randrange(1, 5000), device="cuda") for _ in range(50)]
        results.append(sum(t.sum() for t in mine).item())


results = []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [0.0] * 8
try:
    torch.cuda.set_device(99)
except Exception as error:
    print(type(error).__name__)
else:
    raise AssertionError("a device that is not there was set")
assert torch.ones(3, device="cuda").shape == (3,)

props = torch.cuda.get_device_properties(0)
assert (
    props.name == "NVIDIA H100 80GB HBM3"
    and (props.major, props.minor) == (9, 0)
    and props.multi_processor_count == 132
)
assert torch.cuda.is_bf16_supported() and torch.cuda.device_count() == 1
print("ok")
