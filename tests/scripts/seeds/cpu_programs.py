"""Programs with tensors on the CPU, for the comparison of PyTorch's MemTracker with memtrace. Each function
returns the same as the programs of `programs.py`."""

import torch
from programs import Transformer, two_gpus
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def cpu_only():
    """A training without a GPU."""
    model = Transformer(width=128, layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(8, 64, dtype=torch.long)

    def iteration():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, tokens), iteration


class OffloadedAdam(torch.optim.Optimizer):
    """Adam for parameters on a GPU, whose state and computations are on the CPU."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.cpu()
                state = self.state[parameter]
                if not state:
                    state |= {key: torch.zeros_like(gradient) for key in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                change = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(1e-8)
                parameter.add_(change.to(parameter.device), alpha=-group["lr"])


def offloaded():
    """Optimizer state on the CPU, of a model on a GPU."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    optimizer = OffloadedAdam(model.parameters())
    x = torch.randn(64, 512, device="cuda")

    def iteration():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, x), iteration


def loader():
    """Batches in pinned memory."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(256, 1024), torch.zeros(256, dtype=torch.long))
    batches = DataLoader(data, batch_size=128, pin_memory=True)

    def iteration():
        x, y = next(iter(batches))
        F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, *data.tensors), iteration


PROGRAMS = {each.__name__: each for each in (cpu_only, two_gpus, offloaded, loader)}
