"""Searches for objects by type among those that the garbage collector tracks.

A search walks every object of the program, so callers limit the number of searches, and a program with too
many objects is not searched.
"""

from __future__ import annotations

import gc
import sys

from .native import find_objects, host_memory_left
from .torch_api import Module

# The maximum number of objects to search, which takes about half a second. A time limit would depend on the
# load.
OBJECT_LIMIT = 20_000_000
# A search needs BYTES_OF_OBJECT of host memory for each object, and SPARE_BYTES: before Python 3.12,
# `gc.get_objects` creates a list with a pointer to each object. If this used up the host memory, the kernel
# would kill the program.
BYTES_OF_OBJECT = 8
SPARE_BYTES = 32 << 20

# The number of searches for an outermost module that this process may still make.
_root_searches_left = 8


def why_not_searchable() -> str:
    """Returns the reason why the objects of the program cannot be searched, or an empty text if they can."""
    objects = sys.getallocatedblocks()
    if objects > OBJECT_LIMIT:
        return f"the program has more than {OBJECT_LIMIT // 10**6} million objects"
    if host_memory_left() < objects * BYTES_OF_OBJECT + SPARE_BYTES:
        return "the host has too little memory left for a search"
    return ""


def live_objects(*kinds) -> list:
    """Returns the live objects of these types, or an empty list if the program cannot be searched."""
    if why_not_searchable():
        return []
    return find_objects(gc.get_objects, *kinds)


def children(module) -> list:
    """Returns the direct children of a module, even if its `__init__` has not run."""
    return [child for child in vars(module).get("_modules", {}).values() if child is not None]


def outermost_module(module):
    """Returns the outermost module that contains this one. A child may be called before
    its root: `vae.encoder(x)`.

    Returns the module itself if it has no parameters, or if this process has used up its searches.
    """
    global _root_searches_left
    if not _root_searches_left or next(module.parameters(), None) is None:
        return module
    _root_searches_left -= 1
    parents: dict[int, object] = {}
    for other in live_objects(Module):
        for child in children(other):
            parents.setdefault(id(child), other)
    visited = {id(module)}
    while id(module) in parents and id(parents[id(module)]) not in visited:
        module = parents[id(module)]
        visited.add(id(module))
    return module
