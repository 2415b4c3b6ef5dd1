"""The texts of the trace and their ids, in both directions."""

from __future__ import annotations

from .native import text_id

_ids: dict[str, int] = {"": 0}
_texts: dict[int, str] = {0: ""}


def id_of(text: str) -> int:
    """The id of a text."""
    found = _ids.get(text)
    if found is None:
        found = _ids[text] = text_id(text)
        _texts[found] = text
    return found


def common_ancestor(one: int, other: int) -> int:
    """The id of the innermost module path that contains both paths, which are given by their ids. 0 when
    there is none: they belong to different models."""
    if one == other:
        return one
    ours, theirs = _texts.get(one, "").split("."), _texts.get(other, "").split(".")
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    return id_of(".".join(ours[:shared]))
