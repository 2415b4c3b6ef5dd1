"""A program that reads copies of an answer, or values that follow from it, again and again is stopped.

`MEMTRACE_PHANTOM_READS` is the number of reads after which it is stopped.
"""

import os

import torch

bound = int(os.environ["MEMTRACE_PHANTOM_READS"])
done = torch.rand(16, device="cuda") > 2
answer = done.tolist()
request = torch.ones(500)
reads = 0
try:
    while reads < 1000:
        request.cuda()
        assert (~done.clone()).tolist() == [not flag for flag in answer]
        reads += 1
except RuntimeError as error:
    assert "timed out" in str(error), error
assert reads == bound - 1, reads
print("ok")
