"""Parses sizes such as `2 GiB`, `500 MB` and `64k`, and formats sizes."""

from __future__ import annotations

import re

_BINARY = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(i?b)?\s*", re.IGNORECASE | re.ASCII)


def parse(text: object) -> int:
    """Returns a size in bytes. As in the command, each unit is a power of 1024: `KiB`, `KB`
    and `k` are all 1024 bytes.

    Raises ValueError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    try:
        if match is None or (match[3] or "").lower() == "ib" and not match[2]:
            raise ValueError
        number = float(match[1]) if "." in match[1] else int(match[1])
        size = int(number * 1024 ** _BINARY[match[2].lower()])
        if size >= 2**63:
            raise ValueError
        return size
    except (OverflowError, ValueError):
        raise ValueError(
            f"{repr(text)[:80]} is not a size; write a number of bytes, or a text such as '2 GiB' or '500 MB'"
        ) from None


def show(size: int) -> str:
    """Formats a size in the units of memtrace's reports."""
    if abs(size) < 1024:
        return f"{size} B"
    for power, unit in [(3, "GiB"), (2, "MiB"), (1, "KiB")]:
        # A size that two decimals would round up to 1024 has the next unit.
        if power == 1 or abs(size) >= 1024**power - 1024 ** (power - 1) // 200:
            return f"{size / 1024**power:.2f} {unit}"
