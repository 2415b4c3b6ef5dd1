"""Compared with torch: odd sizes, views, resizes, threads, streams, frees out of order, and a caught OOM."""

import random
import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
from checkpoints import checkpoint

MIB = 1 << 20
random.seed(0)


def empty(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


# Allocate each size alone in an empty cache, to compare its block, its rounding and its segment.
for size in [
    1,
    2,
    511,
    512,
    513,
    1024,
    1025,
    MIB - 1,
    MIB,
    MIB + 1,
    2 * MIB,
    10 * MIB - 1,
    10 * MIB,
    10 * MIB + 1,
    20 * MIB + 3,
    100 * MIB + 511,
]:
    torch.cuda.empty_cache()
    tensor = empty(size)
    checkpoint("size", requested={str(tensor.data_ptr()): size})
    del tensor

# A block larger than the request: the rest of the 12 MiB is too small to be split off.
torch.cuda.empty_cache()
tensor = empty(12 * MIB)
del tensor
tensor = empty(11 * MIB + 512 * 1024 + 3)
checkpoint("reused", requested={str(tensor.data_ptr()): tensor.numel()})
del tensor

# A request of 0 bytes gets no block.
nothing = empty(0)
checkpoint("zero")

# A view keeps its base live; a resize allocates a new block and frees the old one.
base = empty(3 * MIB)
view = base[MIB : MIB + 5].view(5)
del base
checkpoint("view")
del view
checkpoint("view gone")
storage = empty(4 * MIB).untyped_storage()
storage.resize_(9 * MIB + 1)
checkpoint("grown")
storage.resize_(17)
checkpoint("shrunk")
storage.resize_(0)
checkpoint("emptied storage")

# Frees out of order leave holes, which later requests fill.
held = [
    empty(random.choice([1, 700, 5000, 70_000, MIB, 3 * MIB, 11 * MIB]) + random.randrange(600))
    for _ in range(200)
]
random.shuffle(held)
for _ in range(20):
    for _ in range(8):
        del held[random.randrange(len(held))]
    held += [empty(random.randrange(1, 4 * MIB)) for _ in range(6)]
    checkpoint("shuffle")
del held

# Eight threads at once; some free blocks of the others.
passed = []
lock = threading.Lock()


def work(seed):
    rng = random.Random(seed)
    mine = []
    for _ in range(150):
        mine.append(empty(rng.randrange(1, 300_000)))
        if len(mine) > 10:
            with lock:
                passed.append(mine.pop(rng.randrange(len(mine))))
        if rng.random() < 0.3:
            with lock:
                if passed:
                    passed.pop(rng.randrange(len(passed)))


threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
checkpoint("threads")
passed.clear()
checkpoint("threads gone")

# Other streams, each with its own pool of blocks.
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    tensor = empty(2 * MIB)
    pinned = torch.empty(MIB, pin_memory=True)
    tensor.copy_(torch.empty(2 * MIB, dtype=torch.uint8), non_blocking=True)
checkpoint("stream")
torch.cuda.synchronize()
del tensor, pinned
checkpoint("stream gone")

# More than the device's memory.
total = torch.cuda.get_device_properties(0).total_memory
try:
    empty(2 * total)
except torch.cuda.OutOfMemoryError as error:
    print(type(error).__name__, str(error).split(".")[0])
checkpoint("oom")
try:
    rest = [empty(total // 3) for _ in range(4)]
except torch.cuda.OutOfMemoryError as error:
    print(type(error).__name__, str(error).split(".")[0])
checkpoint("oom when full")

torch.cuda.empty_cache()
checkpoint("end")
print("done", torch.cuda.max_memory_allocated())
