"""A program that sends one input and then reads one unknown value again and again is stopped.

`MEMTRACE_PHANTOM_READS` is the number of reads after which it is stopped.
"""

import os

import torch

bound = int(os.environ["MEMTRACE_PHANTOM_READS"])
request = torch.ones(500)
counts = torch.empty(16, dtype=torch.int32, device="cuda")
reads = 0
try:
    while reads < 1000:
        request.cuda()
        counts.random_()
        assert counts.tolist() == [0] * 16
        reads += 1
except RuntimeError as error:
    assert "timed out" in str(error), error
assert reads == (bound - 1 if 0 < bound <= 1000 else 1000), reads

# New input is progress. (A stopped program gets the same error again.)
if not bound:
    for step in range(1000):
        torch.full((10,), float(step)).cuda()
        counts.tolist()
print("ok")
