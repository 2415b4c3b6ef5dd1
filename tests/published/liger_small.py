"""Liger-Kernel: softmax and squared ReLU of one row of N elements, backward by ones."""

import torch
from harness import figure
from harness.liger import peak, sweep


def squared_relu(x):
    return torch.square(torch.nn.functional.relu(x))


def case(N, arguments):
    dtype = torch.float32 if "32" in arguments.variant else torch.bfloat16
    function = squared_relu if "relu" in arguments.variant else torch.nn.Softmax(dim=-1)
    x = torch.randn(N, device="cuda", dtype=dtype, requires_grad=True)

    def full():
        y = function(x)
        y.backward(torch.ones_like(y), retain_graph=True)

    figure(f"N={N}", allocated=peak(full))


sweep("N", case)
