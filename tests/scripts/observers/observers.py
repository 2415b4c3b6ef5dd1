"""The events that profilers, debuggers and coverage tools of the program see: `observers.py TOOL...`.

Each tool has a process of its own. The output has no address, no time and no order that differs between two
runs, so a traced run prints the same as an untraced one.
"""

import _thread
import contextlib
import copy
import cProfile
import gc
import io
import json
import os
import pdb
import re
import sys
import trace as line_counts

import torch

HERE = os.path.abspath(__file__)
PACKAGES = os.path.dirname(os.path.dirname(torch.__file__))


class Scale(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device="cuda"))
        self.register_buffer("offset", torch.zeros(size, device="cuda"))

    def forward(self, x, fail=False):
        if fail:
            raise ValueError("the model's own error")
        return x * self.weight + self.offset


class Model(torch.nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, size, device="cuda"), Scale(size)])

    def forward(self, x, fail=False):
        x = torch.relu(self.layers[0](x))
        return self.layers[1](x, fail=fail)


class Own(torch.optim.SGD):
    """An optimizer class of the program, made after the tracer was installed."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16, device="cuda")).sum()
        loss.backward()
        optimizer.step()


def work():
    """Everything that makes the tracer run Python: the first allocation, calls, backwards, steps, the end of
    a module, an OOM."""
    model = Model()
    teacher = copy.deepcopy(model)
    train(model, torch.optim.Adam(model.parameters(), lr=0.1), 4)
    train(model, Own(model.parameters(), lr=0.1), 2)
    with contextlib.suppress(ValueError):
        model(torch.ones(4, 16, device="cuda"), fail=True)
    embedding = torch.nn.Embedding(32, 8, sparse=True, device="cuda")
    sparse = torch.optim.SparseAdam(embedding.parameters())
    for _ in range(2):
        embedding(torch.arange(4, device="cuda")).sum().backward()
        sparse.step()
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    del teacher, sparse, embedding
    in_thread(lambda: train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2))


def in_thread(function):
    """Runs a function in another thread. The waits of `threading.Thread` take another way in each run."""
    has_ended = _thread.allocate_lock()

    def run():
        start_tool()
        function()
        sys.setprofile(None)
        sys.settrace(None)
        has_ended.release()

    has_ended.acquire()
    _thread.start_new_thread(run, ())
    has_ended.acquire()


def start_tool():
    """Starts the tool in another thread."""


def place(file, line, name):
    return f"{file.replace(PACKAGES + '/', '').replace(HERE, 'program')}:{line} {name}"


def show(events):
    """Prints events. Those of the thread come last: only their own order is fixed."""
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
    """The lines that ran and how often, by the coverage tool of the standard library."""
    counter = line_counts.Trace(count=True, trace=False)
    counter.runfunc(work)
    for (file, line), count in sorted(counter.results().counts.items()):
        print(place(file, line, ""), count)


def debugger():
    """A session of pdb that steps into every call from the first allocation on, then continues to the end."""
    told = io.StringIO()
    commands = io.StringIO("step\n" * 1200 + "where\ncontinue\n")
    session = pdb.Pdb(stdin=commands, stdout=told, nosigint=True, readrc=False)
    session.use_rawinput = False
    session.runcall(work)
    lines = told.getvalue().replace(PACKAGES + "/", "").replace(HERE, "program")
    print(re.sub(r"x[0-9a-f]{8,}", "ADDRESS", lines))


def torch_profiler():
    with torch.profiler.profile(with_stack=True, profile_memory=True, with_modules=True) as profiler:
        work()
    path = os.path.join(os.environ["OWNER_OUT"], "profile.json")
    profiler.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [
        f"{event.get('cat')} {event['name']}".replace(PACKAGES + "/", "").replace(HERE, "program")
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
    "torch_profiler": torch_profiler,
}

# The first optimizer imports dynamo, which takes events by the million.
torch.optim.SGD([torch.zeros(1)])
gc.disable()
for tool in sys.argv[1:]:
    print(tool, flush=True)
    child = os.fork()
    if child == 0:
        TOOLS[tool]()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, tool
