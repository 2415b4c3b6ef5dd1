"""Prints when tensors die and how much memory is in use. Searches must not change the output."""

import gc
import sys
import threading
import weakref

import memtrace
import torch

search = memtrace.retained if sys.argv[1] == "with" else list
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
print(gc.isenabled(), gc.get_threshold(), sys.getswitchinterval())


def rebind():
    tensor = torch.ones(1 << 18, device="cuda")
    cell = torch.ones(1 << 18, device="cuda")

    def use():
        return cell

    search()
    dies, cell_dies = weakref.ref(tensor), weakref.ref(cell)
    references = sys.getrefcount(tensor), sys.getrefcount(cell)
    tensor = cell = None
    print("rebound:", dies() is None and cell_dies() is None, references, use())


def generate():
    for _ in range(2):
        tensor = torch.ones(1 << 18, device="cuda")
        yield weakref.ref(tensor)
        del tensor
        yield None


def in_thread(stop):
    tensor = torch.ones(1 << 18, device="cuda")
    stop.wait()
    print("thread:", sys.getrefcount(tensor))


stop = threading.Event()
thread = threading.Thread(target=in_thread, args=(stop,))
thread.start()
for _ in range(8):
    output = model(torch.randn(1024, 256, device="cuda"))
    node = weakref.ref(output)
    search()
    loss = output.square().mean()
    search()
    loss.backward()
    search()
    del output, loss
    print("output dies:", node() is None, torch.cuda.memory_allocated())
    optimizer.step()
    optimizer.zero_grad()
    rebind()
    steps = generate()
    alive = next(steps)
    search()
    next(steps)
    print("generator:", alive() is None)
try:
    held = torch.ones(1 << 18, device="cuda")
    raise ValueError
except ValueError as error:
    search()
    dies = weakref.ref(held)
    del held
    print("exception:", dies() is None, sys.getrefcount(error))
stop.set()
thread.join()
print(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"])
print(gc.isenabled(), gc.get_threshold(), sys.getswitchinterval())
