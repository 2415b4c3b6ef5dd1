"""Searches for objects by type among those that the garbage collector tracks.

A search walks every object of the program, so callers limit how often they do it, and a program with too many
objects is not searched.
"""

from __future__ import annotations

import gc
import sys

from .native import find_objects
from .torch_api import Module

# Objects: a search of so many takes about half a second. A limit in time would depend on the load.
OBJECT_LIMIT = 20_000_000


def are_searchable() -> bool:
    """False when the program has too many objects to search."""
    return sys.getallocatedblocks() <= OBJECT_LIMIT


def live_objects(*kinds) -> list:
    """The live objects of these types; none when the program has too many objects to search."""
    if not are_searchable():
        return []
    return find_objects(gc.get_objects, *kinds)


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
    for other in live_objects(Module):
        for child in children(other):
            parents.setdefault(id(child), other)
    visited = {id(module)}
    while id(module) in parents and id(parents[id(module)]) not in visited:
        module = parents[id(module)]
        visited.add(id(module))
    return module
