"""A CUDA graph of two layers, captured and replayed, and the time of the replay by events."""

import json

import torch

model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
x = torch.randn(64, 512, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    model(x)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), torch.no_grad():
    y = model(x)
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
graph.replay()
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()
    refuses = 0
except RuntimeError:
    refuses = 1
print(json.dumps({"captured": y.numel(), "refuses_synchronize": refuses}))
