"""PyTorch's own trackers over two training steps of a small net, beside the trace: what they say, as JSON.

trackers.py mem|memory
"""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(1000, 2000)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2000, 500)
        self.register_buffer("scale", torch.ones(300))

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x))).sum()


model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=True)


def step(x):
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(devices):
    return {str(device): {str(getattr(key, "value", key)): value for key, value in types.items()} for device, types in devices.items()}


if sys.argv[1] == "mem":
    from torch.distributed._tools.mem_tracker import MemTracker

    x = torch.randn(64, 1000, device="cuda")
    step(x)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x)
    with tracker:
        step(x)
    print(json.dumps({
        "peak": snapshot(tracker.get_tracker_snapshot("peak")),
        "current": snapshot(tracker.get_tracker_snapshot("current")),
        "modules": {
            stats.mod_fqn: {state.value: [snapshot(one) for one in snapshots] for state, snapshots in stats.snapshots.items()}
            for stats in tracker.memory_tracking.values()
        },
    }))
else:
    from torch.distributed._tools.memory_tracker import MemoryTracker

    x = torch.randn(64, 1000, device="cuda")
    tracker = MemoryTracker()
    tracker.start_monitor(model)
    step(x)
    step(x)
    tracker.stop()
    print(json.dumps({
        "allocated": {str(k): v for k, v in tracker.memories_allocated.items()},
        # torch 2.6 calls it after CUDA.
        "retries": tracker._num_alloc_retries if hasattr(tracker, "_num_alloc_retries") else tracker._num_cuda_retries,
        "markers": tracker._markers,
    }))
