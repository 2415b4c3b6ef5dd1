"""Writes an HTML page about the ranks of a job: a zoomable map of their differences,
and the ranks that differ.

The page opens from disk and makes no network request."""

from __future__ import annotations

import base64
import html
import json
import zlib
from pathlib import Path
from typing import Any

from . import _heat_map

_FOLDER = Path(__file__).resolve().parent / "ranks_page"


def write(path: Path, grid: _heat_map.Grid, differing: dict[str, Any], title: str, facts: list[str]) -> None:
    """Writes the page. `differing` has the number of differing devices, and those that differ most."""
    line_of = {(rank, device): n // grid.devices_per_line for n, (rank, device, _) in enumerate(grid.devices)}
    hosts: dict[str | None, int] = {}
    about = {
        "facts": facts,
        "columns": grid.columns,
        "lines": grid.lines,
        "devices_per_line": grid.devices_per_line,
        "steps": grid.steps_per_column,
        "from": grid.from_steps,
        "to": grid.to_steps,
        "medians": grid.medians,
        "ranks": [rank for rank, _, _ in grid.devices],
        "devices": [device for _, device, _ in grid.devices],
        "hosts": [hosts.setdefault(host, len(hosts)) for _, _, host in grid.devices],
        "names": ["no host" if host is None else host for host in hosts],
        "differing": [{**row, "line": line_of[row["rank"], row["device"]]} for row in differing["list"]],
        "differing_devices": differing["devices"],
        "least": _heat_map.LEAST_SHARE,
        "decade": _heat_map.PER_DECADE,
        "last": _heat_map.LAST_LEVEL,
    }
    text = json.dumps(about, separators=(",", ":")).encode()
    packer = zlib.compressobj(6, wbits=-15)
    packed = packer.compress(len(text).to_bytes(4, "little") + text + bytes(grid.cells)) + packer.flush()
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    # Base64 prevents a text of a trace from being read as HTML.
    for place, content in [
        ("title", html.escape(title)),
        ("style", (_FOLDER / "page.css").read_text(encoding="utf-8")),
        ("script", (_FOLDER / "page.js").read_text(encoding="utf-8")),
        ("data", base64.b64encode(packed).decode()),
    ]:
        page = page.replace(f"<!--{place}-->", content, 1)
    path.write_text(page, encoding="utf-8")
