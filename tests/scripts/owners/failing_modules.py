"""Modules that raise when memtrace's own Python reads their parameters. The program must not notice."""

import torch


class Refusal(Exception):
    pass


class Unformattable(Exception):
    def __str__(self):
        raise ValueError("no text either")


class Refusing(dict):
    """The parameters of a module: torch finds each one by name, but iteration fails."""

    error = None

    def items(self):
        raise self.error


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
weight = model[1].weight
model[1].__dict__["_parameters"] = Refusing(model[1]._parameters)
refusal = Refusal("parameters are not listed today")
for error in (refusal, refusal, Unformattable()):
    Refusing.error = error
    model(torch.ones(4, 8, device="cuda")).sum().backward()
print(weight.grad is not None)
