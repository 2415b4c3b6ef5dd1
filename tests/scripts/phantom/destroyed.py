"""Objects that a program creates and destroys for each op take no more host memory after the first rounds."""

import gc

import torch


def resident():
    """Returns the resident memory in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


def grows_by(work, rounds):
    """Returns the KiB that `rounds` more rounds add after as many first rounds."""
    sizes = []
    for _ in range(2):
        for _ in range(rounds):
            work()
        gc.collect()
        sizes.append(resident())
    return sizes[1] - sizes[0]


def event():
    torch.cuda.Event(enable_timing=True).record()


lstm = torch.nn.LSTM(8, 8, 2).cuda()
batch = torch.randn(3, 2, 8, device="cuda")


def recurrent():
    lstm(batch)[0].sum().backward()


# A leaked event would add 144 bytes, and the leaked descriptors of a cuDNN call 12 KiB.
assert grows_by(event, 20_000) < 500, "events"
grown = grows_by(recurrent, 150)
assert grown < 500, f"descriptors: {grown} KiB"

# A new event inherits nothing from a destroyed one at the same address.
stream = torch.cuda.current_stream()
first = torch.cuda.Event(enable_timing=True)
first.record()
stream.synchronize()
del first
second = torch.cuda.Event()
assert second.query()
second.record()
stream.synchronize()
try:
    second.elapsed_time(second)
except (RuntimeError, ValueError):
    pass
else:
    raise AssertionError("an event without timing has a time")
