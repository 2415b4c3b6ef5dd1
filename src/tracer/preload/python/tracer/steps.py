"""Hooks the steps of optimizers (see src/tracer/preload/python/optimizer_steps.rs).

torch wraps the function `step` of a class when the first optimizer of that class is created. The function
inside the wrapper is hooked, because torch always calls it with `*args, **kwargs`.
"""

from __future__ import annotations

from .native import hook_step
from .subclasses import with_subclasses
from .torch_api import Function, Optimizer


def _code_of_wrapper():
    """Returns the code of torch's wrapper around the steps of every class, or None if it is not found."""
    # Read from the namespace: an attribute lookup would give the class a version in the interpreter's cache.
    outer = vars(Optimizer).get("profile_hook_step")
    outer = getattr(outer, "__func__", outer)
    constants = outer.__code__.co_consts if type(outer) is Function else ()
    return next((code for code in constants if getattr(code, "co_name", "") == "wrapper"), None)


_wrapper = _code_of_wrapper()
# The arguments of `hook_steps` once it has succeeded; empty before.
_hooks: tuple = ()


def _function_to_hook(step):
    """Returns the function that torch's wrapper calls, or will call once it wraps `step`."""
    layers = []
    while type(step) is Function and step not in layers:
        layers.append(step)
        step = vars(step).get("__wrapped__")
    for index, layer in enumerate(layers[:-1]):
        if layer.__code__ is _wrapper:
            return layers[index + 1]
    return layers[0] if layers else None


def hook_steps(before, after) -> bool:
    """Makes `before` and `after` run around each step of every optimizer, with the optimizer as argument.
    Returns False if this interpreter does not allow it."""
    global _hooks
    step = _function_to_hook(vars(Optimizer).get("step"))
    if step is None or not hook_step(step, Function.__basicsize__, before, after):
        return False
    _hooks = (before, after)
    hook_new_classes()
    return True


def hook_new_classes() -> None:
    """Hooks the steps of optimizer classes that were created since the last call."""
    if not _hooks:
        return
    for kind in with_subclasses(Optimizer):
        step = _function_to_hook(vars(kind).get("step"))
        if step is not None:
            hook_step(step, Function.__basicsize__, *_hooks)
