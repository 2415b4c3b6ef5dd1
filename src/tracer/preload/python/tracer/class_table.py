"""A table by class that keeps no class alive. A class of the program may hold a tensor."""

from __future__ import annotations

import weakref


class ClassTable:
    """What a function returns for each class. The function is called once for each class."""

    def __init__(self, function) -> None:
        self._function = function
        # By id(class): a reference to the class, because the id may be that of a later one, and the result.
        self._results: dict[int, tuple[weakref.ref, object]] = {}

    def __getitem__(self, kind: type):
        known = self._results.get(id(kind))
        if known is None or known[0]() is not kind:
            known = self._results[id(kind)] = (weakref.ref(kind), self._function(kind))
        return known[1]
