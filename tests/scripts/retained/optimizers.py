"""Makes optimizers of parameters that a module, a variable or an object has, and of parameters that are gone.
Prints what a search finds, one JSON object a line."""

import json

import memtrace
import torch


class Scene:
    def __init__(self):
        self.points = torch.nn.Parameter(torch.zeros(512, 512, device="cuda"))
        self.optimizer = torch.optim.Adam([{"params": [self.points], "name": "points"}])


class Touchy(dict):
    """A table whose own methods fail during a search."""

    def __iter__(self):
        assert not searching
        return super().__iter__()

    keys = items = values = get = __iter__


class Keyed(torch.nn.Parameter):
    def __hash__(self):
        assert not searching
        return id(self)


def search():
    global searching
    searching = True
    found = memtrace.retained()
    searching = False
    return found


def stepped(parameters):
    optimizer = torch.optim.Adam(parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def in_function():
    latent = torch.nn.Parameter(torch.zeros(512, 512, device="cuda"))
    optimizer = stepped([latent])
    found = memtrace.retained()
    del optimizer, latent
    return found


def of_torchscript():
    # The tables of the module's parameters are in C++.
    model = torch.jit.script(torch.nn.Linear(512, 512, device="cuda"))
    optimizer = stepped(model.parameters())
    found = memtrace.retained()
    del optimizer, model
    return found


searching = False
memtrace.step(0)
model = torch.nn.Linear(512, 512, device="cuda")
of_model = stepped(model.parameters())
raw = [torch.nn.Parameter(torch.zeros(512, 512, device="cuda"))]
of_raw = stepped(raw)
scene = Scene()
assert not search() and not in_function() and not of_torchscript()
odd = stepped([Keyed(torch.zeros(512, 512, device="cuda"))])
odd.state = Touchy(odd.state)
[odd_found] = search()
assert odd_found["tensors"] == 4 and odd_found["holder"].startswith("Adam in variable `odd`"), odd_found
odd.param_groups = "none"
assert [found["tensors"] for found in search()] == [4]
del odd, odd_found
gone = torch.nn.Linear(512, 512, device="cuda")
schedulers = {"of": stepped(gone.parameters())}
for step in range(1, 20):
    # The gradients are of the last step.
    memtrace.step(step)
    gone.zero_grad()
    gone(torch.zeros(1, 512, device="cuda")).sum().backward()
    schedulers["of"].step()
del gone
memtrace.step(60)
for found in memtrace.retained():
    print(json.dumps(found))
