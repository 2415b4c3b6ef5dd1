"""Another thread turns the garbage collector off while memtrace's tracer calls a class of the program."""

import gc
import threading

import torch
from torch import nn

asked, done = threading.Event(), threading.Event()


class Slow(nn.Module):
    """A module whose `named_modules` waits until the other thread is done."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def named_modules(self, *args, **kwargs):
        asked.set()
        done.wait(10)
        return super().named_modules(*args, **kwargs)

    def forward(self, x):
        return self.inner(x)


def turn_off() -> None:
    asked.wait(10)
    gc.disable()
    done.set()


other = threading.Thread(target=turn_off)
other.start()
model = Slow()
model.inner.cuda()
model(torch.zeros(1, 4, device="cuda"))
for _ in model.named_modules():
    break
other.join()
print("enabled:", gc.isenabled())
