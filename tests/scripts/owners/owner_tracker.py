"""Runs MemTracker in the same process and on the same steps as the trace.

    owner_tracker.py NAME...    cases of this file and models of `owner_models.py`

Each runs in a forked child; its pid is printed. Each snapshot of MemTracker leaves the mark `tracker:N`
and, in `$OWNER_OUT/NAME.jsonl`, its totals by category.
"""

import itertools
import json
import os
import sys
import warnings

import owner_models
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Tracker(MemTracker):
    """A MemTracker for the lifetime of its process; each label records its figures."""

    def __init__(self, name, models, optimizers):
        super().__init__()
        self.numbers = itertools.count()
        self.file = open(os.path.join(os.environ["OWNER_OUT"], f"{name}.jsonl"), "w")  # noqa: SIM115
        self.track_external(*models, *optimizers)
        self.__enter__()

    def __call__(self, label):
        number = next(self.numbers)
        torch.cuda.nvtx.mark(f"tracker:{number}")
        line = {
            "number": number,
            "label": label,
            "in_backward": self._mod_tracker.is_bw,
            "totals": self.totals("current"),
        }
        self.file.write(json.dumps(line) + "\n")

    def totals(self, when):
        snapshot = self.get_tracker_snapshot(when).get(torch.device("cuda", 0), {})
        return {getattr(kind, "value", str(kind)): size for kind, size in snapshot.items()}

    def finish(self):
        # Releases the workspaces between two marks: all memory without a tensor that is freed there is a
        # library's workspace.
        torch.cuda.nvtx.mark("workspaces:begin")
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.nvtx.mark("workspaces:end")
        self.__exit__(None, None, None)
        self.file.write(json.dumps({"peak": self.totals("peak")["Total"]}) + "\n")
        self.file.close()

    def _pre_fw_hook(self, module, inputs):
        # Forgets the module before its forward, because MemTracker rejects a second call of a root.
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)
        self(f"before forward of {self._mod_tracker.get_known_fqn(module)}")

    def _post_fw_hook(self, module, inputs, outputs):
        super()._post_fw_hook(module, inputs, outputs)
        self(f"after forward of {self._mod_tracker.get_known_fqn(module)}")

    def _pre_bw_hook(self, module, args):
        super()._pre_bw_hook(module, args)
        self("before backward of a module")

    def _post_bw_hook(self, module, args):
        super()._post_bw_hook(module, args)
        self("after backward of a module")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recompute=None, width=64):
        super().__init__()
        self.tokens = nn.Embedding(300, width)
        self.first = Block(width)
        self.again = Block(width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 300)
        self.recompute = recompute or (lambda block, x: block(x))

    def forward(self, x):
        x = self.recompute(self.again, self.first(self.tokens(x)))
        return self.head(self.norm(x.flatten(0, 1)))


def loss_of(model):
    x = torch.randint(300, (4, 32), device="cuda")
    return F.cross_entropy(model(x), x.flatten())


def net(name, *, recompute=None, optimizers=lambda p: [torch.optim.AdamW(p, foreach=False)], backwards=1):
    model = Net(recompute).cuda()
    optimizers = optimizers(list(model.parameters()))
    tracker = owner_models.Checkpoints(name, [model], optimizers)
    for _ in range(3):
        for _ in range(backwards):
            loss = loss_of(model)
            tracker("loss")
            loss.backward()
            tracker("backward")
        for optimizer in optimizers:
            optimizer.step()
            tracker("step")
        for optimizer in optimizers:
            optimizer.zero_grad()
        del loss
        tracker("zero_grad")


def checkpoint_free(name):
    net(name, recompute=lambda block, x: checkpoint(block, x, use_reentrant=False))


def checkpoint_reentrant(name):
    net(name, recompute=lambda block, x: checkpoint(block, x, use_reentrant=True))


def accumulation(name):
    net(name, backwards=3, optimizers=lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)])


def two_optimizers(name):
    """Uses Muon for the matrices and AdamW for the other parameters."""
    muon = getattr(torch.optim, "Muon", torch.optim.Adagrad)

    def optimizers(parameters):
        matrices = [p for p in parameters if p.dim() == 2]
        return [muon(matrices), torch.optim.AdamW([p for p in parameters if p.dim() != 2])]

    net(name, optimizers=optimizers)


def optimizer_in_backward(name):
    model = Net().cuda()
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}
    tracker = owner_models.Checkpoints(name, [model], optimizers.values())

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss = loss_of(model)
        tracker("loss")
        loss.backward()
        del loss
        tracker("backward")


def double_backward(name):
    """Trains with a penalty on the gradient of the input."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker = owner_models.Checkpoints(name, [model], [optimizer])
    for _ in range(3):
        # Multiplies by 1, so that `x` is no leaf: MemTracker's hooks reject a leaf as the input of a gradient
        # computation.
        x = torch.randn(32, 64, device="cuda", requires_grad=True) * 1
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        tracker("gradient")
        loss = out.mean() + (gradient.pow(2).sum(1) - 1).pow(2).mean()
        del gradient
        tracker("loss")
        loss.backward()
        tracker("backward")
        optimizer.step()
        optimizer.zero_grad()
        del x, out, loss
        tracker("zero_grad")


def run(name):
    # The models of owner_models.py call `Checkpoints` at each point.
    trackers = []

    def follow(*args):
        trackers.append(Tracker(*args))
        return trackers[0]

    owner_models.Checkpoints = follow
    torch.manual_seed(0)
    case = globals().get(name)
    case(name) if case else getattr(owner_models, name)()
    trackers[0].finish()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "llama" in sys.argv:
        pass  # once, not in every child
    for name in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            run(name)
            sys.stdout.flush()
            # Not `sys.exit`: a thread of autograd that waits for the GIL then ends the process with SIGABRT,
            # traced or not.
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(name, child, flush=True)
        assert status == 0, name
