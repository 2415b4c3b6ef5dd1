"""Opens the page of ten thousand ranks in headless Chromium, as wide as a desktop and as a phone.

    ranks_page.py PAGE [PICTURES]

Uses the page as a person does. A failure is a traceback; an error in the console, or a request that leaves
the page, is a failure. With a folder PICTURES, the check saves pictures of each width."""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

page_file = Path(sys.argv[1]).resolve()
pictures = Path(sys.argv[2]) if len(sys.argv) > 2 else None
# The file must fit into a mail.
assert page_file.stat().st_size < 5_000_000, page_file.stat().st_size


def use(browser, width, height, dark):
    context = browser.new_context(
        viewport={"width": width, "height": height}, offline=True, color_scheme="dark" if dark else "light"
    )
    context.set_default_timeout(300_000)  # a busy machine is no failure
    page = context.new_page()
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("canvas[data-drawn]")
    assert page.inner_text("#headline").startswith("9999 ranks"), page.inner_text("#headline")
    title = page.inner_text("#differing-title")
    assert title == "Ranks that differ from the others, furthest first", title
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"

    def drawn():
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return float(page.get_attribute("#map", "data-drawn"))

    # The rank that differs most is the first line, whatever its number.
    box = page.locator("#map").bounding_box()
    page.locator("#map").scroll_into_view_if_needed()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 1)
    cell = page.inner_text("#cell")
    assert cell.startswith("rank 77, GPU 0, node9, steps 10005") and ": 100 % or more above" in cell, cell
    assert "different since steps 1000301 to 1000302" in cell, cell
    assert "100 % above and more" in page.inner_text("#legend"), page.inner_text("#legend")
    assert "up to 2 neighbouring steps" in page.inner_text("#cell-is"), page.inner_text("#cell-is")
    axis = [page.inner_text("#from"), page.inner_text("#to")]
    assert axis == ["step 1000001", "step 1000600"], axis
    # At first only the ranks that differ are shown, and all ranks on demand.
    assert page.inner_text("#shown") == "lines 1 to 48 of 9999", page.inner_text("#shown")
    page.click("#all")
    times = [drawn()]
    assert page.inner_text("#shown") == "all 9999 lines", page.inner_text("#shown")
    rows = page.locator("#differing tr[data-line]")
    assert sorted(rows.locator("button").all_inner_texts()) == ["1234", "5", "77", "9999"]
    assert rows.nth(0).locator("td").all_inner_texts()[:3] == ["77", "+50.00 GiB", "steps 1000301 to 1000302"]
    rows.filter(has=page.locator("button", has_text="9999")).locator("button").click()
    times.append(drawn())
    if pictures:
        page.screenshot(path=pictures / f"chosen-{width}.png", full_page=True)
    # The chosen rank is among the shown lines, because the ranks that differ come first.
    box = page.locator("#map").bounding_box()
    found = set()
    for line in range(24):
        page.mouse.move(box["x"] + box["width"] * 105 / 600, box["y"] + (line + 0.5) * box["height"] / 24)
        text = page.inner_text("#cell")
        if "above" in text or "below" in text:
            found.add(text.split(",")[0])
    assert found == {"rank 9999", "rank 1234"}, found
    page.focus("#map")
    page.keyboard.press("0")
    times.append(drawn())
    page.select_option("#order", "ranks")
    times.append(drawn())
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for _ in range(12):
        page.mouse.wheel(0, -100)
        times.append(drawn())
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    times.append(drawn())
    if pictures:
        page.screenshot(path=pictures / f"ranks-{width}.png", full_page=True)
    assert not messages, messages
    assert len(requests) == 1, requests
    context.close()
    print(f"{width} pixels: a drawing takes {min(times)} to {max(times)} ms")


with sync_playwright() as playwright:
    # No GPU, and no sandbox: the tests may run as root.
    chromium = playwright.chromium.launch(
        executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"], timeout=300_000
    )
    use(chromium, 1400, 900, False)
    use(chromium, 390, 844, True)
    chromium.close()
