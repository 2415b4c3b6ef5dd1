"""Runs a program with a change that `memtrace oom` advises: applied.py CHANGE SCRIPT [ARGUMENT]...

CHANGE is an option of `memtrace advise` (`--checkpoint 'Net.layers.*'`, `--optimizer 8bit`) or `fused`. It
is applied to the classes of PyTorch, so that the program needs no switch of its own.
"""

import functools
import os
import runpy
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def each_root(change):
    """Calls `change(root)` before the first call of each root: a module that no other module calls.

    If `change` returned a wrapper for a root, it wraps each call of that root.
    """
    depth, known, call = [0], {}, nn.Module.__call__  # `known` keeps the modules, so that no id is used again

    def called(module, *args, **kwargs):
        if depth[0]:
            return call(module, *args, **kwargs)
        if id(module) not in known:
            known[id(module)] = change(module), module
        wrap = known[id(module)][0] or (lambda forward: forward)
        depth[0] += 1
        try:
            return wrap(functools.partial(call, module))(*args, **kwargs)
        finally:
            depth[0] -= 1

    nn.Module.__call__ = called


def checkpoint_modules(patterns):
    forms = [pattern.split(".") for pattern in patterns.strip("'").split(",")]
    done = set()

    def takes(form, path):
        # Removes the prefixes that DataParallel, similar wrappers and peft put before the path.
        names = path.removeprefix("module.").removeprefix("base_model.model.").split(".")
        return len(names) == len(form) and all(a in ("*", b) for a, b in zip(form, names))

    def change(root):
        modules = dict(root.named_modules())
        # If a trainer calls only a part of its model, the paths begin at that part, so the pattern is also
        # tried without its first one to three names.
        for dropped in range(1, 4):
            rest = [form for form in forms if len(form) > dropped and form[0] not in done]
            found = [modules[path] for path in modules for form in rest if takes(form[dropped:], path)]
            for module in found:
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            if found:
                done.update(form[0] for form in rest)
                return

    each_root(change)


def autocast():
    """Autocast from the first call of a module to the backward, so that the loss is included."""
    entered = []

    def enter(root):
        def wrap(forward):
            def called(*args, **kwargs):
                if not entered and not torch.is_autocast_enabled("cuda"):
                    entered.append(torch.autocast("cuda", torch.bfloat16))
                    entered[0].__enter__()
                return forward(*args, **kwargs)

            return called

        return wrap

    backward = torch.Tensor.backward

    def leave(*args, **kwargs):
        while entered:
            entered.pop().__exit__(None, None, None)
        return backward(*args, **kwargs)

    torch.Tensor.backward = leave
    each_root(enter)


def bfloat16():
    """Casts each model and its inputs; a loss casts the target to the type of the prediction."""

    def in_one_type(loss):
        return lambda found, wanted, *args, **kwargs: loss(found, wanted.to(found.dtype), *args, **kwargs)

    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        setattr(nn.functional, name, in_one_type(getattr(nn.functional, name)))

    def change(root):
        def wrap(forward):
            def cast(value):
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                return value.bfloat16() if is_float else value

            return lambda *args, **kwargs: forward(
                *map(cast, args), **{name: cast(value) for name, value in kwargs.items()}
            )

        root.bfloat16()
        return wrap

    each_root(change)


def optimizer(name):
    adamw = torch.optim.AdamW

    def arguments(args, kwargs):
        return {"lr": kwargs.get("lr", args[0] if args else 1e-3)}

    class InBackward(torch.optim.Optimizer):
        """Steps each parameter as soon as its gradient exists."""

        def __init__(self, parameters, **kwargs):
            super().__init__(parameters, kwargs)
            self.all = {
                p: adamw([p], **kwargs)
                for group in self.param_groups
                for p in group["params"]
                if p.requires_grad
            }
            for p in self.all:
                p.register_post_accumulate_grad_hook(self.update)

        def update(self, p):
            self.all[p].step()
            self.all[p].zero_grad()

        def step(self, closure=None):
            pass

    def make(_, params, *args, **kwargs):
        if name == "8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(params, **arguments(args, kwargs))
        if name == "offload":
            from torchao.optim import CPUOffloadOptimizer

            return CPUOffloadOptimizer(params, adamw, **arguments(args, kwargs))
        other = {"adafactor": torch.optim.Adafactor, "sgd": torch.optim.SGD, "in-backward": InBackward}[name]
        return other(params, **arguments(args, kwargs))

    replace_adam(make)


def replace_adam(make):
    """Makes `torch.optim.Adam(...)` and `AdamW(...)` return `make(CLASS, ...)`. They stay classes, as
    trainers expect."""
    for original in (torch.optim.Adam, torch.optim.AdamW):

        def new(cls, params, *args, original=original, **kwargs):
            return make(original, params, *args, **kwargs)

        setattr(torch.optim, original.__name__, type(original.__name__, (original,), {"__new__": new}))


def fused():
    replace_adam(lambda adam, params, *args, **kwargs: adam(params, *args, **(kwargs | {"fused": True})))


change, *argv = sys.argv[1:]
option, _, value = change.partition(" ")
{
    "--checkpoint": lambda: checkpoint_modules(value),
    "--optimizer": lambda: optimizer(value),
    "--offload": lambda: optimizer("offload"),
    "--autocast": autocast,
    "--dtype": bfloat16,
    "fused": fused,
}[option]()
sys.argv = argv
sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
runpy.run_path(argv[0], run_name="__main__")
