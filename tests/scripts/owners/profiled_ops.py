"""Prints the op that torch.profiler names for each block of a GPT step, in order of time.

A line is `ADDRESS BYTES OP`, for the time between the marks `profiled:begin` and `profiled:end`.
"""

import sys
from pathlib import Path

import torch
from torch._C._profiler import _EventType

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from train_gpt import GPT

with torch.device("cuda"):
    model = GPT(vocabulary=8192, context=256, width=256, heads=4, layers=2)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(8192, (4, 256)).cuda()


def step():
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


step()
activities = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
    torch.cuda.nvtx.mark("profiled:begin")
    step()
    torch.cuda.nvtx.mark("profiled:end")

found = []
todo = [(node, "(none)") for node in profiler.profiler.kineto_results.experimental_event_tree()]
while todo:
    node, op = todo.pop()
    if node.tag == _EventType.Allocation:
        block = node.extra_fields
        if block.device.type == "cuda" and block.alloc_size > 0:
            found.append((node.start_time_ns, block.ptr, block.alloc_size, op))
    if node.tag == _EventType.TorchOp:
        op = node.name
    todo += [(child, op) for child in node.children]
for _, address, size, op in sorted(found):
    print(address, size, op)
