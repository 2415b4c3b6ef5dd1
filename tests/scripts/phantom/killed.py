"""Reads values that no kernel computed, and waits for the tracer to write them. Ends with the argument `end`,
else kills itself."""

import os
import signal
import sys
import time

import torch

x = torch.randn(64, 64, device="cuda")
torch.linalg.svd(x)
torch.cuda.synchronize()
for _ in range(7):
    (x @ x).sum().item()
time.sleep(1)
if sys.argv[1:] != ["end"]:
    os.kill(os.getpid(), signal.SIGKILL)
