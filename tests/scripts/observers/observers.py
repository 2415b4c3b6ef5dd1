"""Prints the events that profilers, debuggers and coverage tools see: `observers.py PROGRAM TOOL...`.

PROGRAM is a module next to this file. Its function `work` gets a function that runs another one in a thread.
Each tool runs in its own process. The output has no address, no time and no order that differs between two
runs, so a traced run prints the same as an untraced one.
"""

import _thread
import cProfile
import gc
import importlib
import io
import json
import os
import pdb
import re
import sys
import trace as line_counts

# The folders of `sys.path`, longest first, so that the longest one is removed from a file's name.
FOLDERS = sorted((folder + "/" for folder in sys.path if folder), key=len, reverse=True)


def in_thread(function):
    """Runs a function in another thread. `threading.Thread` would cause other events in each run."""

    def run():
        start_tool()
        function()
        sys.setprofile(None)
        sys.settrace(None)

    # From Python 3.12, cProfile also records other threads, so without the GIL it may miss the end of `run`.
    # Only Python 3.13 and later can wait for it.
    if hasattr(_thread, "start_joinable_thread"):
        _thread.start_joinable_thread(run).join()
        return
    has_ended = _thread.allocate_lock()

    def run_and_signal():
        run()
        has_ended.release()

    has_ended.acquire()
    _thread.start_new_thread(run_and_signal, ())
    has_ended.acquire()


def start_tool():
    """Starts the tool in a new thread. Does nothing until `listen` replaces it."""


def work():
    program.work(in_thread)


def relative(text):
    """Returns a text without the folders of its files."""
    for folder in FOLDERS:
        text = text.replace(folder, "")
    return text


def place(file, line, name):
    return f"{relative(file)}:{line} {name}"


def show(events):
    """Prints events. The thread's events come last, because only their own order is fixed."""
    for thread in (True, False):
        for is_main, event in list(events):
            if is_main is thread:
                print(event)
    print(len(events), "events")


def listen(set_function):
    """Prints the events of `sys.setprofile` or `sys.settrace`."""
    global start_tool
    events, main = [], _thread.get_ident()

    def listener(frame, kind, argument):
        name = getattr(argument, "__qualname__", "?") if kind.startswith("c_") else frame.f_code.co_name
        where = place(frame.f_code.co_filename, frame.f_lineno, name)
        events.append((_thread.get_ident() == main, f"{kind} {where}"))
        return listener

    def start_tool():
        set_function(listener)

    set_function(listener)
    work()
    set_function(None)
    show(events)


def profile():
    listen(sys.setprofile)


def trace():
    listen(sys.settrace)


def cprofile():
    profiler = cProfile.Profile()
    profiler.runcall(work)
    lines = []
    for entry in profiler.getstats():
        code = entry.code
        name = code if isinstance(code, str) else place(code.co_filename, code.co_firstlineno, code.co_name)
        lines.append(f"{name.split(' at 0x')[0]} called {entry.callcount} times, {entry.reccallcount} inside")
    print(*sorted(lines), sep="\n")


def coverage():
    """Prints the lines that ran and how often, by the coverage tool of the standard library."""
    counter = line_counts.Trace(count=True, trace=False)
    counter.runfunc(work)
    for (file, line), count in sorted(counter.results().counts.items()):
        print(place(file, line, ""), count)


def debugger():
    """Runs pdb: it makes 1,200 steps from the start of `work`, into every call, then continues to the end."""
    reported = io.StringIO()
    commands = io.StringIO("step\n" * 1200 + "where\ncontinue\n")
    session = pdb.Pdb(stdin=commands, stdout=reported, nosigint=True, readrc=False)
    session.use_rawinput = False
    session.runcall(work)
    # `ctypes` of Python 3.14 returns an address as a number.
    print(re.sub(r"x[0-9a-f]{8,}|\b\d{12,}\b", "ADDRESS", relative(reported.getvalue())))


def monitoring():
    """Prints the events of `sys.monitoring`, which Python 3.12 introduced."""
    events, main, tool = [], _thread.get_ident(), sys.monitoring.PROFILER_ID
    kinds = ("PY_START", "PY_RETURN", "PY_UNWIND", "CALL", "LINE", "RAISE")

    def listener(kind):
        def listen(code, where, *rest):
            # Leaves out lines of this file in other threads: a thread runs on after it has signaled its end,
            # so these lines appear only in some runs.
            if code.co_filename == __file__ and _thread.get_ident() != main:
                return
            name = getattr(rest[0], "__qualname__", "?") if kind == "CALL" else code.co_name
            event = f"{kind} {place(code.co_filename, where, name)}"
            events.append((_thread.get_ident() == main, event))

        return listen

    sys.monitoring.use_tool_id(tool, "observers")
    for kind in kinds:
        sys.monitoring.register_callback(tool, getattr(sys.monitoring.events, kind), listener(kind))
    sys.monitoring.set_events(tool, sum(getattr(sys.monitoring.events, kind) for kind in kinds))
    work()
    sys.monitoring.set_events(tool, 0)
    show(events)


def torch_profiler():
    import torch

    with torch.profiler.profile(with_stack=True, profile_memory=True, with_modules=True) as profiler:
        work()
    path = os.path.join(os.environ["OWNER_OUT"], "profile.json")
    profiler.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [
        relative(f"{event.get('cat')} {event['name']}")
        for event in sorted(events, key=lambda event: float(event.get("ts", 0)))
        if event.get("cat") in ("cpu_op", "python_function", "user_annotation", "cpu_instant_event")
    ]
    lines = [re.sub(r"0x[0-9a-f]+", "ADDRESS", name) for name in names]
    print(*sorted(lines), sep="\n")
    print(len(lines), "events")


TOOLS = {
    "profile": profile,
    "trace": trace,
    "cprofile": cprofile,
    "coverage": coverage,
    "debugger": debugger,
    "monitoring": monitoring,
    "torch_profiler": torch_profiler,
}

program = importlib.import_module(sys.argv[1])
gc.disable()
for tool in sys.argv[2:]:
    print(tool, flush=True)
    child = os.fork()
    if child == 0:
        TOOLS[tool]()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, tool
