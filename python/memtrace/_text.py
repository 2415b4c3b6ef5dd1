"""Prepares texts of a trace for a terminal."""

from __future__ import annotations

# The maximum length of a text, in characters.
LONGEST = 200


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: object, none: str = "none", longest: int = LONGEST) -> str:
    """Returns the text with control characters escaped, so that it cannot affect the terminal.

    `none` replaces null and an empty text."""
    shown = "" if text is None else str(text)
    cut = shown[:longest] + ("…" if len(shown) > longest else "")
    # Control characters, direction marks, and parts of a file name that are not UTF-8 are not printable.
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
    return safe or none
