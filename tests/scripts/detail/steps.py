"""Trains eight steps with a checkpoint in each. Before each step the file `callbacks` in OWNER_OUT gets a
line: whether torch has callbacks for ops, backward functions and user scopes.

With `rough` a child is forked before anything is on the GPU, and trains two steps. Step 3 is larger than the
steps before, and step 5 asks for more memory than the card has.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))

from checkpoints import checkpoint

library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
# std::optional<at::StepCallbacks> at::getStepCallbacksUnlessEmpty(RecordScope): empty where torch takes its
# short path. The result is returned through a pointer, and an empty one leaves the buffer unchanged.
callbacks_of = library._ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE
callbacks_of.argtypes, callbacks_of.restype = [ctypes.c_void_p, ctypes.c_uint8], ctypes.c_void_p


def has_callbacks(scope):
    place = ctypes.create_string_buffer(4096)
    callbacks_of(ctypes.addressof(place), scope)
    return any(place.raw)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(256, 256)

    def forward(self, x):
        return self.inner(x).relu() + x


rough = "rough" in sys.argv
steps = 8
if rough:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        steps = 2
torch.manual_seed(0)
with torch.device("cuda"):
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
checkpoint("built")


def train(step):
    rows = 4096 * (8 if rough and step == 3 else 1)
    inputs = torch.randn(rows, 256, device="cuda")
    if rough and step == 5:
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.OutOfMemoryError:
            print("out of memory")
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


with open(Path(os.environ["OWNER_OUT"]) / "callbacks", "w") as file:
    for step in range(steps):
        print(*(int(has_callbacks(scope)) for scope in (0, 1, 7)), file=file, flush=True)
        train(step)
        checkpoint("step")
        print(step, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
