"""Maps the texts of the trace to their ids, and ids to texts."""

from __future__ import annotations

from .native import text_id

_ids: dict[str, int] = {"": 0}
_texts: dict[int, str] = {0: ""}


def id_of(text: str) -> int:
    """Returns the id of a text."""
    found = _ids.get(text)
    if found is None:
        found = _ids[text] = text_id(text)
        _texts[found] = text
    return found


def common_ancestor(one: int, other: int) -> int:
    """Returns the id of the innermost module path that contains both paths, which are given by their ids.
    Returns 0 if the paths belong to different models."""
    if one == other:
        return one
    ours, theirs = _texts.get(one, "").split("."), _texts.get(other, "").split(".")
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    return id_of(".".join(ours[:shared]))
