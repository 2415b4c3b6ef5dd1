"""Memory rules of older releases of PyTorch, for sources whose release no longer runs here.

Each function restores a rule that a pull request removed; a case calls those that its release had.
"""

import torch
from torch import nn
from torch.nn import functional


def second_intermediate_of_adam() -> None:
    """Before 2.1 the foreach Adam held the root and the denominator together (pytorch/pytorch#104780)."""
    original = torch._foreach_addcdiv_

    def addcdiv(parameters, averages, root, *scale):
        denominator = torch._foreach_add(root, 0.0)
        return original(parameters, averages, denominator, *scale)

    torch._foreach_addcdiv_ = addcdiv


class SavingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, dim):
        ctx.dim = dim
        result = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        scores, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, result, ctx.dim, scores.dtype), None


def softmax_saves_its_input() -> None:
    """Before 1.11 `softmax` saved its input besides its result (pytorch/pytorch#65242)."""

    def softmax(scores, dim):
        return SavingSoftmax.apply(scores.float() if torch.is_autocast_enabled() else scores, dim)

    functional.softmax = softmax


def gelu_is_fp32_under_autocast() -> None:
    """Before 1.10 autocast ran `gelu` in fp32 (pytorch/pytorch#59639)."""
    original = functional.gelu

    def gelu(x):
        return original(x.float() if torch.is_autocast_enabled() else x)

    functional.gelu = gelu


def zero_grad_keeps_the_gradients() -> None:
    """Before 2.0 `zero_grad` wrote zeros and kept the memory (pytorch/pytorch#92731)."""
    nn.Module.zero_grad.__defaults__ = (False,)
