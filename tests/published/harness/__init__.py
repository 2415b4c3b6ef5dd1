"""Helpers of the published cases. A case prints a JSON line for each figure, with `figure`."""

from __future__ import annotations

import json


def figure(label: str, **values: float) -> None:
    """Prints the quantities of one label, in bytes or as a plain count: allocated=..., reserved=..."""
    print(json.dumps({"label": label, **{name: int(value) for name, value in values.items()}}), flush=True)
