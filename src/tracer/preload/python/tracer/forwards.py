"""Steps of a program that trains nothing: the calls of the model that is called first.

A program trains when an optimizer exists or a backward function has run. Then the optimizer's steps count.
"""

from __future__ import annotations

import weakref

from .native import backward_count, forward_begins_step, innermost_module
from .torch_api import Optimizer

_trains = False
# The model whose calls are counted; another one when it is gone.
_counted: weakref.ref | None = None


def has_optimizer() -> bool:
    """Returns True if an optimizer was made: torch then wraps the `step` of its class."""
    classes, seen = [Optimizer], set()
    while classes:
        kind = classes.pop()
        if kind not in seen:
            seen.add(kind)
            classes += type.__subclasses__(kind)
            if getattr(vars(kind).get("step"), "hooked", False):
                return True
    return False


def module_is_called(module) -> None:
    """A module is called, before it is entered: a further call of the counted model begins a step."""
    global _trains
    if _trains or _counted is None or innermost_module():
        return
    if backward_count() or has_optimizer():
        _trains = True
    elif module is _counted():
        forward_begins_step()


def root_was_called(root) -> None:
    """The outermost module has a path now: it is the counted model if no model is counted yet."""
    global _counted
    if not _trains and (_counted is None or _counted() is None):
        _counted = weakref.ref(root)
