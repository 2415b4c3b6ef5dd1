"""Hooks the calls of module classes whose own `__call__` does not call torch's, such
as GPyTorch's classes."""

from __future__ import annotations

import sys
import weakref

from .subclasses import with_subclasses
from .torch_api import Function, Module

# A `__call__` whose code has one of these names reaches `Module._call_impl`, which is hooked anyway.
DELEGATES = {"__call__", "_call_impl", "_wrapped_call_impl"}

# The argument of `hook_overridden_calls`: a function that hooks one `__call__`.
_hook = None
# The ids of the classes that were checked. An id is rarely reused, because classes of
# modules are rarely freed.
_seen: set[int] = set()
# References to the classes whose `__call__` was hooked.
_hooked: list[weakref.ref] = []
# The result of `_numbers` at the last walk, and the number of calls of `hook_new_overridden_calls`.
_known_numbers: tuple[int, int, int] = (0, 0, 0)
_calls = 0
# One in so many calls walks all classes, whatever `_numbers` returns.
EVERY = 10


def hook_overridden_calls(hook) -> None:
    """Calls `hook` with each `__call__` that does not reach torch's. Does so for the classes that exist now
    and, in `hook_new_overridden_calls`, for classes that are created later."""
    global _hook
    _hook = hook
    hook_new_overridden_calls()


def _numbers() -> tuple[int, int, int]:
    """Returns three numbers, one of which almost always changes when a class is created whose `__call__` must
    be hooked: of imported modules, of classes directly below `Module`, and of classes directly below a class
    with a hooked `__call__`."""
    hooked = [kind for reference in _hooked if (kind := reference()) is not None]
    below = sum(len(type.__subclasses__(kind)) for kind in hooked)
    return len(sys.modules), len(type.__subclasses__(Module)), below


def hook_new_overridden_calls() -> None:
    """Checks the classes that were created since the last walk. This is called after each backward, and a
    program may have thousands of classes, so they are walked only if `_numbers` changes, and at one in EVERY
    calls."""
    global _known_numbers, _calls
    if _hook is None:
        return
    _calls += 1
    numbers = _numbers()
    if numbers == _known_numbers and _calls % EVERY:
        return
    _known_numbers = numbers
    for kind in with_subclasses(Module):
        if kind is Module or id(kind) in _seen:
            continue
        _seen.add(id(kind))
        # An attribute lookup would enter the class into the interpreter's type cache and assign it a version
        # tag, and version tags are limited in number. So read the class's namespace instead.
        call = vars(kind).get("__call__")
        if type(call) is Function and not DELEGATES & set(call.__code__.co_names):
            _hooked.append(weakref.ref(kind))
            _hook(call)
