"""Hooks the calls of module classes whose own `__call__` does not call torch's, such
as GPyTorch's classes."""

from __future__ import annotations

import sys

from .subclasses import with_subclasses
from .torch_api import Module

Function = type(lambda: None)
# A `__call__` whose code has one of these names reaches `Module._call_impl`, which is hooked anyway.
DELEGATES = {"__call__", "_call_impl", "_wrapped_call_impl"}

# The argument of `hook_overridden_calls`: a function that hooks one `__call__`.
_hook = None
# The ids of the classes that were checked. An id is rarely reused, because classes of
# modules are rarely freed.
_seen: set[int] = set()
# The number of imported modules and of classes that derive from `Module` directly, at the last check. A
# program may have thousands of module classes, and the check runs after each backward, so classes are
# searched only if one of these numbers has changed, and at one in EVERY checks.
_numbers: tuple[int, int] = (0, 0)
_checks = 0
EVERY = 100


def hook_overridden_calls(hook) -> None:
    """Calls `hook` with each `__call__` that does not reach torch's. Does so for the classes that exist now
    and, in `hook_new_overridden_calls`, for classes that are created later."""
    global _hook
    _hook = hook
    hook_new_overridden_calls()


def hook_new_overridden_calls() -> None:
    """Checks the classes that were created since the last call."""
    global _numbers, _checks
    if _hook is None:
        return
    _checks += 1
    numbers = (len(sys.modules), len(type.__subclasses__(Module)))
    if numbers == _numbers and _checks % EVERY:
        return
    _numbers = numbers
    for kind in with_subclasses(Module):
        if kind is Module or id(kind) in _seen:
            continue
        _seen.add(id(kind))
        # An attribute lookup would enter the class into the interpreter's type cache and assign it a version
        # tag, and version tags are limited in number. So read the class's namespace instead.
        call = vars(kind).get("__call__")
        if type(call) is Function and not DELEGATES & set(call.__code__.co_names):
            _hook(call)
