"""Simulates a torch that stores the size of a storage at an unknown offset, so that memtrace cannot learn the
layout.

While memtrace learns the layout, the tensors report wrong values.
"""

import torch

real = torch.Tensor.untyped_storage


class Elsewhere:
    def __init__(self, storage):
        self._cdata, self.data_ptr, self.nbytes = storage._cdata, storage.data_ptr, lambda: 3 << 40


torch.Tensor.untyped_storage = lambda tensor: Elsewhere(real(tensor))
first = torch.zeros(1000, device="cuda")
for _ in range(1000):
    # Lets the interpreter run its pending calls.
    first.add_(1)
torch.Tensor.untyped_storage = real

net = torch.nn.Linear(64, 64, device="cuda")
for _ in range(2):
    net(torch.randn(8, 64, device="cuda")).sum().backward()
print(torch.cuda.max_memory_allocated())
