"""A program for observers.py that makes the tracer run Python where no torch is installed.

It uses the modules of a stand-in for torch, and `LIBC10_CUDA` is a stand-in for torch's allocator.
"""

import contextlib
import ctypes
import functools
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "owners"))
from stand_in_torch import Module, install  # noqa: E402

install()
library = ctypes.CDLL(os.environ["LIBC10_CUDA"])
library.torch_allocate.argtypes, library.torch_allocate.restype = [ctypes.c_size_t], ctypes.c_void_p


class Inner(Module):
    def forward(self, deeper, fail=False):
        library.torch_allocate(512)
        if fail:
            raise ValueError("the model's own error")
        return [self.forward(deeper - 1) for _ in range(deeper)]


class Net(Module):
    def forward(self, deeper, fail=False):
        inner = self._modules["inner"]
        functools.partial(inner, deeper)()
        return inner(deeper, fail=fail)


def work(in_thread):
    """Does the first allocation, calls of every depth, a failure, the end of a module, a second thread."""
    library.torch_allocate(512)
    for _ in range(100):
        pass
    net, other = Net(inner=Inner()), Net(inner=Inner())
    for deeper in (0, 1, 2, 3):
        net(deeper)
    other(1)
    with contextlib.suppress(ValueError):
        net(1, fail=True)
    del other
    in_thread(lambda: net(1))
