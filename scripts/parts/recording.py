"""Writes the console blocks of a page, one after the other, as an animated SVG of a terminal.

    python3 scripts/parts/recording.py docs/tutorial.md > docs/gallery/tutorial.svg

A test compares the blocks with what their commands print, and the SVG with the blocks.
"""

import html
import re
import sys
from pathlib import Path

COLUMNS = 118
LINE, CHARACTER, MARGIN = 18, 7.8, 14
# The time in seconds between a command and its output, and for each line of output.
TYPING, READING = 1.2, 0.55


def blocks(page: str) -> list[list[str]]:
    """Returns the console blocks of a page, as lines of at most COLUMNS characters."""
    found = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [[cut(line) for line in block.splitlines()] for block in found]


def cut(line: str) -> str:
    return line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..."


def screens(block: list[str]) -> list[tuple[list[str], float]]:
    """Returns the screens of the terminal, one after each command and one after its output, with
    their durations in seconds."""
    shown: list[str] = []
    result: list[tuple[list[str], float]] = []
    output = 0
    for line in block:
        if line.startswith("$ "):
            if output:
                result.append((shown[:], READING * output + 1))
            shown.append(line)
            result.append((shown[:], TYPING))
            output = 0
        else:
            shown.append(line)
            output += 1
    result.append((shown, READING * output + 2))
    return result


def text(line: str, row: int) -> str:
    kind = "command" if line.startswith("$ ") else "bad" if line.startswith("verdict:") else "out"
    y = MARGIN + LINE * (row + 1)
    return f'<text class="{kind}" x="{MARGIN}" y="{y}" xml:space="preserve">{html.escape(line)}</text>'


def svg(page: str) -> str:
    frames = [screen for block in blocks(page) for screen in screens(block)]
    total = sum(seconds for _, seconds in frames)
    rows = max(len(lines) for lines, _ in frames)
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), 2 * MARGIN + LINE * rows + 6
    rules, groups, start = [], [], 0.0
    for number, (lines, seconds) in enumerate(frames):
        begin, end = 100 * start / total, 100 * (start + seconds) / total
        rules.append(
            f"@keyframes f{number}{{0%{{opacity:{int(number == 0)}}}{begin:.3f}%{{opacity:1}}"
            f"{end:.3f}%,100%{{opacity:0}}}}.f{number}{{animation:f{number} {total:.1f}s step-end infinite}}"
        )
        groups.append(
            f'<g class="frame f{number}">'
            + "".join(text(line, row) for row, line in enumerate(lines))
            + "</g>"
        )
        start += seconds
    # Readers who prefer reduced motion see the first block as a whole.
    still = len(screens(blocks(page)[0])) - 1
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The commands of the tutorial in a terminal</title>
<style>
text{{font:13px/1 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#c9d1d9}}
.command{{fill:#7ee787}}.bad{{fill:#ffa657}}.frame{{opacity:0}}
{"".join(rules)}
@media (prefers-reduced-motion:reduce){{.frame{{animation:none}}.f{still}{{opacity:1}}}}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
{chr(10).join(groups)}
</svg>
"""


if __name__ == "__main__":
    sys.stdout.write(svg(Path(sys.argv[1]).read_text()))
