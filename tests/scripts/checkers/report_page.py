"""Opens report pages in headless Chromium and uses them as a person does.

    report_page.py CHECK PAGE [ARGUMENT...] [-- CHECK PAGE [ARGUMENT...]]...

The checks are the functions below. A failure is a traceback; a success prints the measured figures. An
error in the console, or a request that leaves the page, fails every check.
"""

import atexit
import functools
import json
import re
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"


@functools.cache
def browser():
    """Returns the one browser of this process."""
    playwright = sync_playwright().start()
    # No GPU, and no sandbox: the tests may run as root.
    chromium = playwright.chromium.launch(
        executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=300_000
    )
    atexit.register(lambda: (chromium.close(), playwright.stop()))
    return chromium


class Open:
    """A page, opened from disk with no network."""

    def __init__(self, path, hash="", width=1400, height=900, dark=False):
        self.path, self.hash, self.size, self.dark = path, hash, {"width": width, "height": height}, dark

    def __enter__(self):
        context = browser().new_context(
            viewport=self.size, color_scheme="dark" if self.dark else "light", offline=True
        )
        context.set_default_timeout(300_000)  # a busy machine is no failure
        self.page = context.new_page()
        self.messages, self.requests = [], []
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "dialog", lambda dialog: (self.messages.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        self.page.goto("file://" + self.path + self.hash)
        self.page.evaluate("memtrace.ready")
        self.rest()
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                assert not self.messages, self.messages
                own = [url for url in self.requests if not url.startswith("file://" + self.path)]
                assert not own and len(self.requests) == 1, self.requests
        finally:
            self.page.context.close()

    def rest(self):
        """Waits until the page has been drawn and the address has been written."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.page.wait_for_timeout(250)

    def state(self):
        return self.page.evaluate("({...memtrace.state})")

    def text(self, selector):
        return self.page.inner_text(selector)

    def rows(self):
        """Returns the name and the displayed bytes of each row of the table."""
        cells = "[...document.querySelectorAll('#table tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
        return self.page.evaluate(cells)

    def key(self, key):
        self.page.evaluate("document.activeElement.blur()")
        self.page.keyboard.press(key)
        self.rest()

    def curve(self):
        return self.page.locator("#curve").bounding_box()


def shown(size):
    """Formats bytes as the command does."""
    for name, unit in [("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]:
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def near(a, b, slack):
    assert abs(a - b) <= slack, (a, b, slack)


def accessible(it):
    """Checks that every column has a head, and that the keyboard reaches every area that scrolls."""
    nameless = it.page.evaluate(
        "[...document.querySelectorAll('th')].filter((head) => !head.textContent.trim()).length"
    )
    assert nameless == 0, nameless
    unreachable = it.page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((box) => box.tabIndex !== 0 || !box.getAttribute('aria-label')).length"
    )
    assert unreachable == 0, unreachable


def peak(path, *answers):
    """Compares the page with `memtrace peak --json`, for every grouping."""
    with Open(path) as it:
        for file in answers:
            answer = json.loads(Path(file).read_text())
            moment = answer["peak"]
            head = it.text("#headline")
            assert shown(moment["bytes"]) in head, (head, moment)
            if moment["step"] >= 0:
                assert f"step {moment['step']}" in head, (head, moment)
            for word in ["phase", "module"]:
                assert moment[word] == "(none)" or moment[word] in head, (head, moment)
            # At another moment, the key P must return to the peak and pin it.
            it.page.evaluate("location.hash = '#at=1'")
            it.rest()
            it.key("p")
            state = it.state()
            assert state["at"] == moment["ts_ns"], (state, moment)
            assert state["from"] <= moment["ts_ns"] <= state["to"], state
            assert "at the peak" in it.text("#live-title") and shown(moment["bytes"]) in it.text(
                "#live-title"
            )
            it.page.click(f"#by [data-value={answer['by']}]")
            it.rest()
            while it.page.is_visible("#more"):
                it.page.click("#more")
                it.rest()
            found = {row[-1].removesuffix(" *"): (row[0], row[3]) for row in it.rows()}
            for group in answer["groups"]:
                assert found.get(group["key"]) == (shown(group["bytes"]), f"{group['blocks']:,}"), (
                    group,
                    found,
                )
            assert len(found) == len(answer["groups"])
            if answer["by"] == "module":
                largest = answer["groups"][0]
                facts = it.page.evaluate(
                    "[...document.querySelectorAll('#facts .fact')].map((box) => box.innerText)"
                )
                [fact] = [fact for fact in facts if fact.startswith("largest module")]
                # The page of an OOM opens at the OOM, and shows the largest module of that moment instead.
                is_same = (
                    "at the peak" not in fact or largest["key"] in fact and shown(largest["bytes"]) in fact
                )
                assert is_same, (largest, fact)
            # The live blocks at the peak, and those that the page leaves out, must add up to its bytes.
            live = it.page.evaluate(f"memtrace.liveAt({moment['ts_ns']})")
            assert live["sum"] + live["rest"] == moment["bytes"], (live["sum"], live["rest"], moment)
        print("peak", shown(moment["bytes"]), "by", len(answers), "keys")


def use(path):
    """Checks wheel, drag, click, keys, search, sort and themes, and that the address keeps the state."""
    with Open(path) as it:
        home = it.state()
        box = it.curve()
        middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        it.page.mouse.move(*middle)
        under = lambda s: (
            s["from"] + (s["to"] - s["from"]) * ((middle[0] - box["x"] - 62) / (box["width"] - 76))
        )
        it.page.mouse.wheel(0, -400)
        it.rest()
        zoomed = it.state()
        assert zoomed["to"] - zoomed["from"] < 0.7 * (home["to"] - home["from"]), (home, zoomed)
        near(under(zoomed), under(home), (home["to"] - home["from"]) * 0.01)
        # A drag to the right moves to an earlier time.
        it.page.mouse.down()
        it.page.mouse.move(middle[0] + 200, middle[1], steps=5)
        it.page.mouse.up()
        it.rest()
        panned = it.state()
        assert panned["from"] < zoomed["from"], (zoomed, panned)
        near(panned["to"] - panned["from"], zoomed["to"] - zoomed["from"], 2)
        assert panned["at"] == home["at"], "a drag pins nothing"
        # A click pins the moment under the pointer.
        it.page.mouse.click(middle[0] + 120, middle[1])
        it.rest()
        pinned = it.state()
        where = panned["from"] + (panned["to"] - panned["from"]) * (
            (middle[0] + 120 - box["x"] - 62) / (box["width"] - 76)
        )
        near(pinned["at"], where, (panned["to"] - panned["from"]) * 0.01)
        assert "Live at" in it.text("#live-title") and "peak" not in it.text("#live-title")
        # The table lists the blocks that were live at that moment.
        moment = pinned["at"]
        lived = it.page.evaluate(
            f"(() => {{ const b = memtrace.tracks[memtrace.state.track].blocks; let sum = 0; for (let i = 0; i < b.length; i++) if (b.born[i] <= {moment} && (b.age[i] < 0 || b.born[i] + b.age[i] > {moment})) sum += b.bytes[i]; return sum; }})()"
        )
        assert shown(lived) in it.text("#live-title"), (lived, it.text("#live-title"))
        # The address keeps the view and the pin.
        address = it.page.evaluate("location.hash")
        assert "view=" in address and "at=" in address, address
        with Open(path, address) as again:
            same = again.state()
            for name in ["from", "to", "at"]:
                near(same[name], pinned[name], 1)
        # Keyboard shortcuts.
        it.key("0")
        near(
            it.state()["to"] - it.state()["from"],
            it.page.evaluate("memtrace.tracks[0].end_ns - memtrace.tracks[0].start_ns"),
            1,
        )
        it.key("+")
        assert it.state()["to"] - it.state()["from"] < it.page.evaluate("memtrace.tracks[0].end_ns")
        it.key("ArrowRight")
        for key, mode in [("2", "category"), ("3", "module"), ("1", "lines")]:
            it.key(key)
            assert it.state()["mode"] == mode
            assert it.page.get_attribute(f"#modes [data-value={mode}]", "aria-checked") == "true"
        if it.page.evaluate("memtrace.tracks[0].steps.length") > 1:
            it.key("p")
            it.key("[")
            before = it.state()["at"]
            it.key("]")
            assert it.state()["at"] > before
        it.key("?")
        assert it.page.is_visible("#keys")
        it.page.keyboard.press("Escape")
        # Searches: matches must come first and stay bright, and all other cells must be dimmed.
        it.key("p")
        it.page.click("#by [data-value=module]")
        it.rest()
        name = it.rows()[-1][-1]
        it.key("/")
        it.page.keyboard.type(name)
        it.rest()
        assert name.lower() in it.rows()[0][-1].lower(), it.rows()[0]
        dim = it.page.evaluate(
            "[...document.querySelectorAll('#table tbody tr')].map((row) => [row.className, row.cells[row.cells.length - 1].innerText])"
        )
        for kind, text in dim:
            assert (kind == "dim") == (name.lower() not in text.lower()), (kind, text, name)
        assert it.page.evaluate("document.querySelectorAll('#icicle .dim').length") > 0
        assert "search=" in it.page.evaluate("location.hash")
        assert f"matches of “{name}”" in it.text("#legend"), it.text("#legend")
        it.page.keyboard.press("Escape")
        it.rest()
        assert it.state()["search"] == "" and not it.page.evaluate("document.querySelectorAll('.dim').length")
        # A click on a column sorts the table by it.
        it.page.click("#by [data-value=block]")
        it.rest()
        ages = lambda: [row[4] for row in it.rows()]
        it.page.click("#table th button:has-text('lived')")
        it.rest()
        assert it.page.get_attribute("#table th:has-text('lived')", "aria-sort") == "descending"
        down = ages()
        it.page.click("#table th button:has-text('lived')")
        it.rest()
        assert ages() != down or len(set(down)) == 1
        # The Tab key must stop only once at the icicle, inside which the arrow keys move. Each cell must have
        # a label with its owner and its bytes.
        assert (
            it.page.evaluate(
                "[...document.querySelectorAll('#icicle .cell')].filter((cell) => cell.tabIndex === 0).length"
            )
            == 1
        )
        label = lambda: it.page.evaluate("document.activeElement.getAttribute('aria-label')")
        view = it.state()["from"]
        it.page.focus("#icicle .cell >> nth=0")
        above = label()
        assert re.search(r": \d+\.\d\d [KMG]iB, \d", above), above
        it.page.keyboard.press("ArrowDown")
        below = label()
        assert below.startswith(above.split(": ")[0] + " › "), (above, below)
        it.page.keyboard.press("ArrowUp")
        assert label() == above and it.state()["from"] == view
        # A click on a cell opens it, and a click on a breadcrumb closes it again.
        it.page.click("#icicle .cell >> nth=0")
        it.rest()
        assert it.page.evaluate("document.querySelectorAll('.crumbs button').length") > 1
        it.page.click(".crumbs button >> nth=0")
        it.rest()
        # The themes change the real background.
        ground = lambda: it.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = ground()
        it.key("d")
        assert ground() != light and "theme=dark" in it.page.evaluate("location.hash")
        it.key("d")
        assert ground() == light
        # Every picture has a label.
        unlabelled = it.page.evaluate(
            "[...document.querySelectorAll('[role=img]')].filter((one) => one.offsetParent && !one.getAttribute('aria-label')).map((one) => one.id)"
        )
        assert not unlabelled, unlabelled
        nameless = it.page.evaluate(
            "[...document.querySelectorAll('button, select, input')].filter((one) => one.offsetParent && !(one.innerText || one.title || one.getAttribute('aria-label') || one.labels?.length)).map((one) => one.outerHTML.slice(0, 80))"
        )
        assert not nameless, nameless
        accessible(it)
    with Open(path, dark=True) as it:
        assert it.page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    # No element is wider than a narrow window.
    for width in [700, 380]:
        with Open(path, width=width) as it:
            assert it.page.evaluate("document.documentElement.scrollWidth") <= width, width
    print("used")


def oom(path, answer):
    """Checks that O goes to the OOM, and that the page has the request of `memtrace oom --json`."""
    answer = json.loads(Path(answer).read_text())["ooms"][0]
    # The page opens at the OOM and shows it first.
    with Open(path) as it:
        head = it.text("#headline")
        assert head.startswith("Out of memory") and shown(answer["requested_bytes"]) in head, head
        assert answer["op"] in head and answer["module"] in head, (head, answer)
        state = it.state()
        assert state["at"] == answer["ts_ns"] and state["from"] <= state["at"] <= state["to"], (state, answer)
        assert "at the OOM" in it.text("#holders-title")
        # The verdict and the first remedies come before the figures.
        verdict = it.text("#verdict")
        assert verdict.startswith(answer["verdict"]), (verdict, answer["verdict"])
        assert it.page.locator("#verdict li").count() >= 1, verdict
        assert it.page.evaluate(
            "document.querySelector('#verdict').getBoundingClientRect().bottom"
            " <= document.querySelector('#facts').getBoundingClientRect().top"
        )
        accessible(it)
    with Open(path, "#at=1") as it:
        it.key("o")
        state = it.state()
        assert state["at"] == answer["ts_ns"], (state, answer)
        assert state["from"] <= state["at"] <= state["to"]
        assert "at the OOM" in it.text("#live-title")
        assert shown(answer["requested_bytes"]) in it.text("#live-note"), it.text("#live-note")
        assert it.page.is_visible("#to-oom")
        assert "ran out of memory" in it.text("#badges")
        live = it.page.evaluate(f"memtrace.liveAt({answer['ts_ns']})")
        assert live["sum"] + live["rest"] == answer["allocated_bytes"], (live["sum"], answer)
        # The segment map adds up to the reserved memory.
        assert shown(answer["reserved_bytes"]) + " reserved" in it.text("#segments-note"), it.text(
            "#segments-note"
        )
    print("oom", shown(answer["requested_bytes"]))


def oom_categories(path, first, other):
    """Checks the categories at the OOM: `first` and `other` of blocks and groups, `first` in the headline."""
    with Open(path) as it:
        found = it.page.evaluate(
            """() => { const [t] = memtrace.tracks, mix = {};
            for (const block of memtrace.liveAt(t.ooms.at(-1).ts_ns).live)
                mix[block.category] = (mix[block.category] ?? 0) + block.bytes;
            const groups = (all) => Object.fromEntries(all.category.map(([name, bytes]) => [name, bytes]));
            return { mix, oom: groups(t.at_oom), peak: groups(t.at_peak) }; }"""
        )
        assert found["mix"] == found["oom"] and set(found["mix"]) == {first, other}, found
        assert all(name in found["peak"] for name in found["oom"]), found
        for place in ["#headline", "#holders"]:
            assert first in it.text(place), (place, it.text(place))
        if "(no category)" not in (first, other):
            assert "(no category)" not in it.text("body")
    print("categories", found["oom"])


def without_detail(path, at, short):
    """Checks the live memory at `at`, in a step without detail, and the rounding there and at `short`."""
    with Open(path, f"#at={at}") as it:
        assert "1.56 GiB" in it.text("#live-title"), it.text("#live-title")
        note = it.text("#live-note")
        assert "1 block listed, with 6.2 % of the bytes; the others are without detail." in note, note
        cells = it.page.locator("#icicle .cell").all_inner_texts()
        assert any(cell.startswith("(without detail)") for cell in cells), cells
        # The columns are bytes, share, bar, blocks and name.
        listed = ["100.00 MiB", "6.2 %", "", "1"]
        for key, name, rest in [
            ("module", "(no module)", "(without detail)"),
            ("category", "parameter", "activation"),
        ]:
            it.page.click(f"#by [data-value={key}]")
            it.rest()
            assert it.rows() == [["1.46 GiB", "93.8 %", "", "–", rest], [*listed, name]], (key, it.rows())
        segments = it.text("#segments-note")
        shares = "100.00 MiB in blocks that this page lists, 1.46 GiB in other blocks, 2.44 GiB free."
        assert shares in segments and "holes" not in segments, segments
        assert "Blocks without detail are not listed" in it.text("#footer"), it.text("#footer")
    with Open(path, f"#at={short}&by=block&sort=age") as it:
        assert "1.2 µs" in [row[4] for row in it.rows()], it.rows()
    # Before the first phase, the page names no phase.
    with Open(path, "#at=0") as it:
        assert it.text("#live-note").startswith("0 blocks"), it.text("#live-note")
    print("without detail")


def growth(path, answer):
    """Checks that the chart of the memory in use has the parts of `memtrace leaks`, and fits a phone."""
    found = json.loads(Path(answer).read_text())["processes"][0]["growth"][0]
    for width in (1400, 390):
        with Open(path, width=width) as it:
            text = it.text("#growth-text")
            for part, name in [("kept", "kept"), ("larger_steps", "larger steps"), ("cached", "cached")]:
                now = shown(found["to"]["parts_bytes"][part])
                assert f"{name} {now} (" in text, (text, part, now)
            assert it.page.evaluate("document.documentElement.scrollWidth") <= width
            assert it.page.locator("#growth").bounding_box()["height"] > 200


def compare(path, answer):
    """Checks that the page of two runs shows the change of `memtrace diff --json`."""
    answer = json.loads(Path(answer).read_text())
    a, b = (answer[side]["peak_allocated"]["bytes"] for side in ["before", "after"])
    with Open(path) as it:
        text = it.text("#compare")
        assert shown(a) in text and shown(b) in text and shown(abs(b - a)) in text, text
        changes = {c["key"]: c for c in answer["changes"]}
        rows = it.page.evaluate(
            "[...[...document.querySelectorAll('.changes')].pop().rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        seen = 0
        for row in rows[1:]:
            change = changes[row[-1].strip()]
            assert row[0].strip() == shown(change["before_bytes"]) and row[1].strip() == shown(
                change["after_bytes"]
            ), (row, change)
            seen += 1
        assert seen > 2, rows
        # The difference between the runs comes before the details of one run.
        head = it.text("#headline")
        way = "higher" if b > a else "lower"
        assert f"{shown(abs(b - a))} {way}" in head and shown(a) in head and shown(b) in head, head
        top = lambda selector: it.page.locator(selector).bounding_box()["y"]
        assert top("#compare") < top("#holders") < top("#timeline")
        accessible(it)
    # On a phone each name is inside the screen.
    with Open(path, width=390) as it:
        cells = it.page.evaluate(
            "[...document.querySelectorAll('.changes td:last-child')].map((cell) => { const box = cell.getBoundingClientRect(); return [box.left, box.right, cell.scrollWidth - cell.clientWidth]; })"
        )
        assert cells and all(0 < left < right <= 390 and over <= 0 for left, right, over in cells), cells
    print("compared", seen, "holders")


def sampled(path):
    """Checks that between two samples the memory in use is never below the allocated memory."""
    with Open(path) as it:
        below = it.page.evaluate(
            "(() => { const [t] = memtrace.tracks; const s = t.lines.find((line) => line.name === 'device used'); const a = t.lines[0]; return [...s.high].filter((value, i) => value < a.high[i]).length; })()"
        )
        assert below == 0, below
    print("sampled")


def flat(path):
    """Checks that a sampled line that would flatten all others is hidden until a click shows it."""
    with Open(path) as it:
        entry = it.page.locator("#legend .entry", has_text="device used")
        assert entry.get_attribute("aria-pressed") == "false"
        entry.click()
        it.rest()
        assert (
            it.page.locator("#legend .entry", has_text="device used").get_attribute("aria-pressed") == "true"
        )
    print("flat")


def ranks(path, count):
    """Checks that every rank has a line, and that a click selects it."""
    with Open(path) as it:
        lines = it.page.locator(".rank")
        assert lines.count() == int(count), lines.count()
        peaks = it.page.evaluate("memtrace.tracks.map((track) => track.peak.bytes)")
        for rank in range(int(count)):
            it.page.locator(".rank").nth(rank).click()
            it.rest()
            assert it.state()["track"] == rank
            assert shown(peaks[rank]) in it.text("#headline")
            assert it.page.locator(".rank").nth(rank).get_attribute("aria-pressed") == "true"
    print(count, "ranks")


def hostile(path):
    """Checks that names that look like markup are shown as text."""
    with Open(path) as it:
        assert not it.page.evaluate("globalThis.owned"), "a name of the trace ran"
        assert it.page.evaluate("document.querySelectorAll('img, iframe, b > script').length") == 0
        it.page.click("#by [data-value=module]")
        it.rest()
        text = it.text("body")
        for name in ["</script><script>owned=1</script>", "<img src=x onerror=owned=1>", "<!--{script}-->"]:
            assert name in text, (name, text[:2000])
        for key in ["2", "3"]:
            it.key(key)
        box = it.curve()
        it.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
        it.rest()
        assert not it.page.evaluate("globalThis.owned")
        it.key("w")
        assert it.state()["advice"] == 0 and "--" in it.text("#advice-text"), it.text("#advice-text")
        assert not it.page.evaluate("globalThis.owned")
    print("hostile")


def advice(path, answer):
    """Checks that the switch shows each change of `memtrace advise --json`, with its peak in the curve."""
    changes = json.loads(Path(answer).read_text())["devices"][0]["changes"][:5]
    js = "(() => memtrace.tracks[0].advices.map((a) => [a.change, a.peak.bytes, Math.max(...a.high)]))()"
    for width, dark in [(1400, False), (390, True)]:
        with Open(path, width=width, dark=dark) as it:
            for (change, peak, highest), expected in zip(it.page.evaluate(js), changes, strict=True):
                assert (change, peak) == (expected["change"], expected["after"]["bytes"])
                assert highest == peak, (change, highest, peak)
            before = it.page.evaluate("document.getElementById('curve').toDataURL()")
            assert it.text("#advice-text") == ""
            for place, expected in enumerate(changes):
                it.page.click(f"#advices [data-value='{place}']")
                it.rest()
                text = it.text("#advice-text")
                assert f"{shown(expected['after']['bytes'])} with {expected['change']}" in text, text
                assert expected["assumes"] in text and expected["costs"] in text, text
                assert it.page.evaluate("document.getElementById('curve').toDataURL()") != before
                assert it.page.evaluate("location.hash").endswith(f"advice={place}")
                assert it.page.evaluate("document.documentElement.scrollWidth") <= width
            it.key("2")
            it.key("w")
            assert it.state()["advice"] == -1
            it.key("1")
            assert it.page.evaluate("document.getElementById('curve').toDataURL()") == before
            it.key("w")
            it.page.hover("#curve")
            it.rest()
            assert "with the change" in it.text("#tip"), it.text("#tip")
            accessible(it)
    with Open(path, f"#advice={len(changes)}") as it:
        assert it.state()["advice"] == -1, "an address with no such advice"
    print("advice", len(changes))


def retained(path, *reported):
    """Checks that the box of retained memory has these texts, not as markup; without texts it is hidden."""
    for width, dark in [(1400, False), (390, True)]:
        with Open(path, width=width, dark=dark) as it:
            assert it.page.is_visible("#retained") == bool(reported)
            text = it.text("#retained") if reported else ""
            for part in reported:
                assert part in text, (part, text)
            assert it.page.evaluate("typeof owned") == "undefined"
            wide = it.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (width, wide)
            accessible(it)


def painted(it, canvas):
    """Returns the number of pixels of a canvas that are not transparent."""
    return it.page.evaluate(
        f"""(() => {{ const it = document.getElementById('{canvas}'), c = it.getContext('2d');
        const data = c.getImageData(0, 0, it.width, it.height).data;
        let count = 0; for (let i = 3; i < data.length; i += 4) if (data[i]) count++; return count; }})()"""
    )


def host(path, track, peak, limit, killed):
    """Checks that the host samples are a curve below the GPU's, with the same time axis, at every width."""
    for width, dark in [(1400, False), (390, True)]:
        with Open(path, width=width, dark=dark) as it:
            assert it.page.is_visible("#host-memory")
            text = it.text("#host-text")
            assert peak in text and limit in text, text
            label = it.page.evaluate("memtrace.tracks[0].label")
            assert label.endswith(f", {track}"), label
            legend = it.text("#host-legend")
            for name in ["resident", "without a file", "shared memory", "files", "with child processes"]:
                assert name in legend, (name, legend)
            assert it.page.is_visible("#killed") == bool(killed)
            assert not killed or killed in it.text("#killed"), it.text("#killed")
            whole = painted(it, "host-curve")
            assert whole > 10_000, whole
            # The two curves share one time axis: a zoom in one moves the other.
            above, below = it.curve(), it.page.locator("#host-curve").bounding_box()
            near(above["x"], below["x"], 0.5)
            near(above["width"], below["width"], 0.5)
            before = it.state()
            it.page.locator("#host-curve").scroll_into_view_if_needed()
            below = it.page.locator("#host-curve").bounding_box()
            x, y = below["x"] + below["width"] * 0.6, below["y"] + 60
            it.page.mouse.move(x, y)
            it.rest()
            tip = it.text("#host-tip")
            for part in ["sample at", "resident", "child processes", "50.00 MiB", "limit of the container"]:
                assert part in tip, (part, tip)
            # The sample at 6 s lacks the limit, so the tip must call it unknown.
            sixth = below["x"] + 62 + (6.4 / 13) * (below["width"] - 76)
            it.page.mouse.move(sixth, y)
            it.rest()
            assert "unknown" in it.text("#host-tip"), it.text("#host-tip")
            it.page.mouse.click(x, y)
            it.rest()
            assert it.state()["at"] != before["at"]
            it.page.mouse.wheel(0, -400)
            it.rest()
            after = it.state()
            assert after["to"] - after["from"] < before["to"] - before["from"], (before, after)
            it.key("0")
            wide = it.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (width, wide)
            accessible(it)
    print("host", text)


def host_blocks(path, peak):
    """Checks that the page of the host has its CPU tensors."""
    with Open(path) as it:
        head = it.text("#headline")
        assert "CPU tensors" in head and peak in head, head
        assert "reserved" not in it.text("#facts"), it.text("#facts")
        it.key("p")
        assert peak in it.text("#live-title"), it.text("#live-title")
        assert "Net.fc" in it.text("#live"), it.text("#live")
        assert "--device cpu" in it.text("#footer"), it.text("#footer")
        accessible(it)
    print("host blocks")


def no_host(path):
    """Checks that without host samples the page has no curve of the host, and says so."""
    with Open(path) as it:
        assert not it.page.is_visible("#host-memory") and not it.page.is_visible("#killed")
        assert "Host memory is unknown" in it.text("#footer"), it.text("#footer")
    print("no host")


def no_advice(path, reason):
    """Checks that the page says why, if no change helps."""
    with Open(path, "#advice=0") as it:
        assert it.text("#advice-text") == reason, it.text("#advice-text")
        assert it.state()["advice"] == -1 and not it.page.is_visible("#advices")
        it.key("w")
        assert it.state()["advice"] == -1
    print("no advice")


def empty(path):
    """Checks that the page of a trace without GPU memory has a message."""
    with Open(path) as it:
        assert "No GPU memory" in it.text("#headline"), it.text("#headline")
    print("empty")


def finer(path):
    """Checks that the page, if it has no finer data, prints a command that makes a finer page."""
    with Open(path, "#at=1") as it:
        track = it.page.evaluate(
            "(() => { const t = memtrace.tracks[memtrace.state.track]; return { start: t.start_ns, width: t.width_ns, end: t.end_ns, peak: t.peak.ts_ns }; })()"
        )
        far = track["start"] + (track["end"] - track["start"]) * (
            0.75 if track["peak"] < (track["start"] + track["end"]) / 2 else 0.25
        )
        assert not it.page.is_visible("#finer")
        it.page.evaluate(f"location.hash = '#view={int(far)}:{int(far + track['width'] * 20)}'")
        it.rest()
        text = it.text("#finer")
        found = re.search(r"memtrace report (\S+) --window (\S+):(\S+) -o window.html", text)
        assert found, text
        window = [float(found[i].rstrip("s")) * 1e9 for i in (2, 3)]
        state = it.state()
        near(window[0], state["from"], 2)
        near(window[1], state["to"], 2)
        print(found[0].removesuffix(" -o window.html"))


def tasks(trace):
    """Returns the CPU time and wall time of each main-thread task in a Chromium trace, in ms."""
    events = json.loads(trace)["traceEvents"]
    main = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    return [
        (e.get("tdur", e["dur"]) / 1e3, e["dur"] / 1e3)
        for e in events
        if e["name"] == "RunTask" and e["ph"] == "X" and (e["pid"], e["tid"]) in main
    ]


def gestures(it, x, y):
    """Scrolls, zooms, drags and pans. Returns the tasks, and the time of each frame's script in ms."""
    it.page.mouse.move(x, y)
    it.page.evaluate("memtrace.frames.length = 0")
    browser().start_tracing(
        page=it.page, categories=["devtools.timeline", "disabled-by-default-devtools.timeline"]
    )
    for _ in range(20):
        it.page.mouse.wheel(0, -120)
        it.page.wait_for_timeout(16)
    it.page.mouse.down()
    for step in range(30):
        it.page.mouse.move(x - step * 9, y)
        it.page.wait_for_timeout(16)
    it.page.mouse.up()
    for _ in range(20):
        it.page.mouse.wheel(0, 160)
        it.page.wait_for_timeout(16)
    for _ in range(10):
        it.page.keyboard.press("ArrowLeft")
        it.page.wait_for_timeout(16)
    found = sorted(tasks(browser().stop_tracing()))
    frames = sorted(it.page.evaluate("memtrace.frames"))
    assert len(frames) > 20 and len(found) > 50, (len(frames), len(found))
    return found, frames


def smooth(path, most):
    """Checks that no gesture makes a task of the page's main thread that takes `most` ms of CPU time.

    The times come from Chromium's own trace, per task of the main thread (a frame's script, style, layout and
    paint are one task). CPU time excludes other programs on the machine, but they still slow a core down. So
    the gestures are repeated a few times, and the best time counts: a slow page is slow each time. The
    software renderer that stands in for a GPU runs in its own process and is not counted.
    """
    ROUNDS = 6
    with Open(path) as it:
        box = it.curve()
        x, y = box["x"] + box["width"] * 0.6, box["y"] + 150
        for key, mode in zip("123", ["totals", "by category", "by module"]):
            it.key(key)
            for left in reversed(range(ROUNDS)):
                found, frames = gestures(it, x, y)
                print(
                    f"{mode}: {len(frames)} frames, their script {frames[len(frames) // 2]:.1f} ms in the median, {frames[-1]:.1f} ms at worst; "
                    f"{len(found)} tasks, the longest {found[-1][0]:.1f} ms of CPU ({max(wall for _, wall in found):.1f} ms by the clock)"
                )
                if found[-1][0] < float(most):
                    break
                assert left, found[-5:]


if __name__ == "__main__":
    words = sys.argv[1:]
    while words:
        end = words.index("--") if "--" in words else len(words)
        name, *arguments = words[:end]
        globals()[name](*arguments)
        words = words[end + 1 :]
