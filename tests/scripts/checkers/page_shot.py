"""Takes a picture of a report page.

    page_shot.py PAGE PICTURE [--hash H] [--width W] [--dark] [--since SELECTOR] [--until SELECTOR]
                 [--hover X,Y]

PICTURE is a PNG, or a PDF as the page prints. --since and --until cut the picture above and below elements.
"""

import argparse
import os

from report_page import Open

options = argparse.ArgumentParser()
options.add_argument("page")
options.add_argument("picture")
options.add_argument("--hash", default="")
options.add_argument("--width", type=int, default=1400)
options.add_argument("--dark", action="store_true")
options.add_argument("--since")
options.add_argument("--until")
options.add_argument("--hover")
options = options.parse_args()

with Open(os.path.abspath(options.page), options.hash, width=options.width, dark=options.dark) as it:
    if options.hover:
        x, y = (float(part) for part in options.hover.split(","))
        box = it.curve()
        it.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        it.rest()
    if options.picture.endswith(".pdf"):
        it.page.pdf(path=options.picture, format="A4", print_background=True)
    else:
        clip = None
        if options.until:
            box = it.page.locator(options.until).bounding_box()
            top = it.page.locator(options.since).bounding_box()["y"] - 8 if options.since else 0
            clip = {"x": 0, "y": top, "width": options.width, "height": box["y"] + box["height"] + 10 - top}
        it.page.screenshot(path=options.picture, full_page=True, clip=clip)
