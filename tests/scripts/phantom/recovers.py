"""Trains a small model on the GPU. With `--recover` it halves its batch when memory runs out, and goes on.

It prints the batch of each step, and the errors that it met.
"""

import sys

import torch

recover = "--recover" in sys.argv
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch, step, batches = 4096, 0, []
while step < 6:
    try:
        optimizer.zero_grad()
        model(torch.randn(batch, 2048, device="cuda")).sum().backward()
        optimizer.step()
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory. Tried to allocate" in str(error), error
        if not recover:
            raise
        batch //= 2
        continue
    except RuntimeError as error:
        # torch.AcceleratorError (a RuntimeError) since 2.8, a plain RuntimeError before.
        print(type(error).__name__, str(error).splitlines()[0])
        for _ in range(3):
            try:
                torch.zeros(1 << 22, device="cuda").add_(1)
                torch.cuda.synchronize()
                print("the error was not sticky")
            except RuntimeError as again:
                print("again:", str(again).splitlines()[0])
        break
    batches.append(batch)
    step += 1
print(batches, "retries", torch.cuda.memory_stats().get("num_alloc_retries"), flush=True)
