"""Finds the subclasses of a class."""

from __future__ import annotations

from collections.abc import Iterator


def with_subclasses(base: type) -> Iterator[type]:
    """Yields `base` and each class that inherits from it, directly or not, once."""
    classes: list[type] = [base]
    seen: set[int] = set()
    while classes:
        kind = classes.pop()
        if id(kind) in seen:
            continue
        seen.add(id(kind))
        classes += type.__subclasses__(kind)
        yield kind
