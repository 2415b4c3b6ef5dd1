"""MemTracker, in the same process and on the same steps: what it says at every boundary of a module.

Each of its snapshots leaves the mark `tracker:N` and, in `$OWNER_OUT/tracker.jsonl`, its totals by category.
"""

import itertools
import json
import os

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

numbers = itertools.count()
file = open(os.path.join(os.environ["OWNER_OUT"], "tracker.jsonl"), "w")


class Tracker(MemTracker):
    def say(self, label):
        number = next(numbers)
        torch.cuda.nvtx.mark(f"tracker:{number}")
        snapshot = self.get_tracker_snapshot().get(torch.device("cuda", 0), {})
        totals = {getattr(kind, "value", str(kind)): size for kind, size in snapshot.items()}
        file.write(json.dumps({"number": number, "label": label, "totals": totals}) + "\n")

    def _pre_fw_hook(self, module, inputs):
        super()._pre_fw_hook(module, inputs)
        self.say(f"before forward of {self._mod_tracker.get_known_fqn(module)}")

    def _post_fw_hook(self, module, inputs, outputs):
        super()._post_fw_hook(module, inputs, outputs)
        self.say(f"after forward of {self._mod_tracker.get_known_fqn(module)}")

    def _pre_bw_hook(self, module, args):
        super()._pre_bw_hook(module, args)
        self.say("before backward of a module")

    def _post_bw_hook(self, module, args):
        super()._post_bw_hook(module, args)
        self.say("after backward of a module")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.tokens = nn.Embedding(300, width)
        self.first = Block(width)
        self.again = Block(width)  # recomputed in backward
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 300)

    def forward(self, x):
        x = self.first(self.tokens(x))
        x = checkpoint(self.again, x, use_reentrant=False)
        return self.head(self.norm(x.flatten(0, 1)))


torch.manual_seed(0)
torch.cuda.init()
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
tracker = Tracker()
tracker.track_external(model, optimizer)
with tracker:
    for _ in range(3):
        x = torch.randint(300, (4, 32), device="cuda")
        loss = torch.nn.functional.cross_entropy(model(x), x.flatten())
        tracker.say("loss")
        loss.backward()
        tracker.say("backward")
        optimizer.step()
        tracker.say("step")
        optimizer.zero_grad()
        del loss, x
        tracker.say("zero_grad")
        tracker.reset_mod_stats()
# What no tensor holds and torch lets go of here is a library's workspace.
torch.cuda.nvtx.mark("workspaces:begin")
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.nvtx.mark("workspaces:end")
file.close()
