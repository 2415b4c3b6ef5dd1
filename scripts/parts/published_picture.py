"""Draws two plots as SVG: our numbers against the published numbers, and the error of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 880, 380
TOP, BOTTOM = 52, 52
LEFT_PANEL, RIGHT_PANEL = (64, 416), (500, 860)
INK, GRID, GOOD, OFF = "#24292f", "#d8dee4", "#0969da", "#d4570a"
# Errors above this share are drawn at the edge of the plot.
EDGE = 0.10
LIMIT = 0.005
LABELS = {10: "1 KiB", 20: "1 MiB", 30: "1 GiB", 40: "1 TiB"}


def picture(figures: Sequence[tuple[float, float]]) -> str:
    """Draws pairs of sizes in bytes, each with the published number first and our number second. If our
    number rounds to the published number, the pair must have the published number twice."""
    points = sorted((pair for pair in figures if min(pair) > 0), key=lambda pair: abs(pair[1] / pair[0] - 1))
    if not points:
        raise ValueError("no figure to draw")
    low = math.floor(min(math.log2(min(pair)) for pair in points) / 2) * 2
    high = math.ceil(max(math.log2(max(pair)) for pair in points) / 2) * 2

    def across(size: float, panel: tuple[int, int]) -> float:
        return panel[0] + (math.log2(size) - low) / (high - low) * (panel[1] - panel[0])

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def by_error(error: float) -> float:
        # Linear up to 0.5%, logarithmic beyond, because most errors are zero.
        size = min(abs(error), EDGE)
        step = (
            size / LIMIT * 0.25
            if size <= LIMIT
            else 0.25 + 0.23 * math.log(size / LIMIT) / math.log(EDGE / LIMIT)
        )
        return up(0.5 + math.copysign(step, error))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(LEFT_PANEL[0], 24, "simulated against published memory", weight=600),
        text(RIGHT_PANEL[0], 24, "error of each figure (beyond 10 % at the edge)", weight=600),
    ]
    for power in range(low, high + 1):
        if power not in LABELS:
            continue
        label = LABELS[power]
        for panel in (LEFT_PANEL, RIGHT_PANEL):
            x = across(2.0**power, panel)
            parts += [line(x, up(0), x, up(1)), text(x, up(0) + 18, label, anchor="middle")]
        y = up((power - low) / (high - low))
        parts += [
            line(LEFT_PANEL[0], y, LEFT_PANEL[1], y),
            text(LEFT_PANEL[0] - 8, y + 4, label, anchor="end"),
        ]
    for error in (-EDGE, -LIMIT, 0.0, LIMIT, EDGE):
        y = by_error(error)
        parts += [
            line(RIGHT_PANEL[0], y, RIGHT_PANEL[1], y),
            text(RIGHT_PANEL[0] - 8, y + 4, f"{error:+.1%}" if error else "equal", anchor="end"),
        ]
    parts.append(text(LEFT_PANEL[0] + 6, TOP + 12, "simulated"))
    for panel in (LEFT_PANEL, RIGHT_PANEL):
        parts.append(text(sum(panel) / 2, HEIGHT - 10, "published", anchor="middle"))
    parts.append(
        f'<path d="M{LEFT_PANEL[0]} {up(0)}L{LEFT_PANEL[1]} {up(1)}" stroke="{INK}" stroke-width="0.7"/>'
    )
    for published, ours in points:
        error = ours / published - 1
        color = OFF if abs(error) > LIMIT else GOOD
        y = up((math.log2(ours) - low) / (high - low))
        parts += [
            dot(across(published, LEFT_PANEL), y, color),
            dot(across(published, RIGHT_PANEL), by_error(error), color),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{GRID}"/>'


def dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity="0.45"/>'


def text(x: float, y: float, words: str, anchor: str = "start", weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
