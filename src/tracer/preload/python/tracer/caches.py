"""Tags the key-value caches that are passed to a model, such as the caches of Transformers.

A dynamic cache has new tensors after each call, so it is tagged before and after each call that receives it.
"""

from __future__ import annotations

import weakref
from _thread import get_ident

from .class_table import ClassTable
from .failures import count
from .held import CACHE_WORDS, KV_CACHE, PACKAGES, package_of, tensors_in
from .native import call_after, text_id
from .storages import tag
from .torch_api import without_torch_function

# By id(cache): a reference to the cache, and references to its tagged tensors, by name.
_known: dict[int, tuple[weakref.ref, dict[str, weakref.ref]]] = {}
# By id(module) and thread: the caches of the call in progress. The references are weak, so that a failed call
# keeps no cache alive.
_of_call: dict[tuple[int, int], list[weakref.ref]] = {}
KNOWN_LIMIT = 256


def _find_is_cache(kind: type) -> bool:
    bases = [base for base in kind.__mro__ if base.__name__.endswith("Cache")]
    return any(package_of(base) in PACKAGES for base in bases)


# True for a class that is a cache of one of the libraries in PACKAGES.
IS_CACHE = ClassTable(_find_is_cache)


def tag_cache(cache) -> None:
    """Tags the tensors of a cache that are new since the last call."""
    known = _known.get(id(cache))
    if known is None or known[0]() is not cache:
        if len(_known) >= KNOWN_LIMIT:
            for key in [key for key, (reference, _) in _known.items() if reference() is None]:
                del _known[key]
        known = _known[id(cache)] = (weakref.ref(cache), {})
    tagged, seen = known[1], set()
    for name, tensor in tensors_in(list(vars(cache).items()), PACKAGES, set()):
        before = tagged.get(name)
        if before is None or before() is not tensor:
            tagged[name] = weakref.ref(tensor)
            tag(tensor, KV_CACHE, 0, text_id(name), seen, weak=1)


def caches_are_given(module, args: tuple, kwargs: dict) -> None:
    """Tags the caches among the arguments of an outermost module, before its call and again after it."""
    caches = [value for value in (*args, *kwargs.values()) if IS_CACHE[type(value)]]
    for name, value in kwargs.items():
        if name in CACHE_WORDS and type(value) in (tuple, list):
            # Older versions of the libraries pass a tuple of keys and values for each layer.
            for inner, tensor in tensors_in([(name, value)], PACKAGES, set()):
                tag(tensor, KV_CACHE, 0, text_id(inner), set(), weak=1)
    if caches:
        for cache in caches:
            tag_cache(cache)
        _of_call[id(module), get_ident()] = [weakref.ref(cache) for cache in caches]
        call_after(module, _call_returned)


def _call_returned(module) -> None:
    try:
        with without_torch_function():
            for reference in _of_call.pop((id(module), get_ident()), ()):
                cache = reference()
                if cache is not None:
                    tag_cache(cache)
    except Exception as error:
        # A class of cache may override its attributes.
        count("caches after a call", error)
