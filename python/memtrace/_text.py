"""Texts of a trace on a terminal."""

from __future__ import annotations

# Of a text, in characters.
LONGEST = 200


def first_line(error: BaseException) -> str:
    """What an error says, without the lines that explain it; its class, if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: object, none: str = "none", longest: int = LONGEST) -> str:
    """A text that cannot move the cursor, change a colour or hide what follows it.

    `none` replaces null and an empty text."""
    shown = "" if text is None else str(text)
    cut = shown[:longest] + ("…" if len(shown) > longest else "")
    # Not printable are controls, marks of direction, and the parts of a file name that are not UTF-8.
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
    return safe or none
