"""Searches for objects by type among those that the garbage collector tracks.

A search walks every object of the program, so it is limited in time and number, and callers limit how often
they do it.
"""

from __future__ import annotations

import gc
import sys
import time

from .torch_api import Module

# Seconds of this thread's CPU time: with the wall clock, a busy machine would change what is found.
TIME_LIMIT = 0.5
# Objects. With more, `gc.get_objects` alone takes longer than TIME_LIMIT.
OBJECT_LIMIT = 20_000_000


def live_objects(kinds) -> tuple[list, bool]:
    """The live objects of these types, and whether the search reached the end within its limits.

    Only their types are looked at: attribute access on an arbitrary object may run code of the program.
    """
    found: list = []
    if sys.getallocatedblocks() > OBJECT_LIMIT:
        return found, False
    is_wanted: dict[type, bool] = {}
    deadline = time.thread_time() + TIME_LIMIT
    for count, thing in enumerate(gc.get_objects()):
        if count % 4096 == 0 and time.thread_time() > deadline:
            return found, False
        kind = type(thing)
        wanted = is_wanted.get(kind)
        if wanted is None:
            wanted = is_wanted[kind] = issubclass(kind, kinds)
        if wanted:
            found.append(thing)
    return found, True


def children(module) -> list:
    """The direct children of a module, also of one whose `__init__` has not run."""
    return [child for child in vars(module).get("_modules", {}).values() if child is not None]


_searches_left = 8


def outermost_module(module):
    """The outermost module that contains this one: a part may be called before its root (`vae.encoder(x)`).

    Returns the module itself when it has no parameters, or when this process has searched often enough.
    """
    global _searches_left
    if _searches_left <= 0 or next(module.parameters(), None) is None:
        return module
    _searches_left -= 1
    parents: dict[int, object] = {}
    for other in live_objects(Module)[0]:
        for child in children(other):
            parents.setdefault(id(child), other)
    visited = {id(module)}
    while id(module) in parents and id(parents[id(module)]) not in visited:
        module = parents[id(module)]
        visited.add(id(module))
    return module
