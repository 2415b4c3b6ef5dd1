"""Counts the steps of a program that does not train: each further call of the first model begins a step.

A program trains if an optimizer exists or a backward function has run. Then the optimizer's steps count.
"""

from __future__ import annotations

import weakref

from .native import backward_count, forward_begins_step, innermost_module
from .subclasses import with_subclasses
from .torch_api import Optimizer

_trains = False
# The model whose calls are counted. When this model is freed, the next one that is called replaces it.
_counted: weakref.ref | None = None


def has_optimizer() -> bool:
    """Returns True if an optimizer was created. It is detected by its class, whose `step` torch has then
    wrapped."""
    return any(getattr(vars(kind).get("step"), "hooked", False) for kind in with_subclasses(Optimizer))


def module_is_called(module) -> None:
    """Begins a step if the program does not train and this is an outermost call of the counted model. Called
    before a module is entered."""
    global _trains
    if _trains or _counted is None or innermost_module():
        return
    if backward_count() or has_optimizer():
        _trains = True
    elif module is _counted():
        forward_begins_step()


def root_was_called(root, calls: int) -> None:
    """Makes `root` the counted model if there is no live counted model, or if that is a part of `root`: a
    model may call a part of itself while it is built, such as the parametrization of a weight. Called at each
    call of an outermost module. `calls` is the number of its calls."""
    global _counted
    if _trains:
        return
    counted = None if _counted is None else _counted()
    is_part = calls == 1 and counted is not root and any(part is counted for part in root.modules())
    if counted is None or is_part:
        _counted = weakref.ref(root)
