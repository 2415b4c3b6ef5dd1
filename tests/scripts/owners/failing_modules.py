"""Modules that raise when memtrace's own Python looks at their parameters: the program must not notice."""

import torch


class Refusal(Exception):
    pass


class Unformattable(Exception):
    def __str__(self):
        raise ValueError("no text either")


class Refusing(dict):
    """The parameters of a module: torch finds each by its name, and nobody can list them."""

    error = Refusal("parameters are not listed today")

    def items(self):
        raise self.error


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
weight = model[1].weight
model[1].__dict__["_parameters"] = Refusing(model[1]._parameters)
for _ in range(3):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
Refusing.error = Unformattable()
model(torch.ones(4, 8, device="cuda"))
print(weight.grad is not None)
