"""Tests the thread that detects waits without an end. The argument is the path of `waits.py`."""

import importlib.util
import itertools
import os
import sys
import threading
import time
import types
import weakref

spec = importlib.util.spec_from_file_location("waits", sys.argv[1])
waits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(waits)


def as_torch(code):
    """Returns the names that code defines, as if it were in a file of the watched folders."""
    names = {"time": time, "weakref": weakref}
    exec(compile(code, os.path.join(waits.OWN_FOLDER, "torch.py"), "exec"), names)
    return types.SimpleNamespace(**names)


def watched(patience, launches):
    os.environ[waits.PATIENCE_VARIABLE] = str(patience)
    return waits.Waits("/no/such/folder", lambda place, key: "set", launches, RuntimeError)


def locals_of_a_function_end_with_it():
    # The launches advance, so no call counts as a wait.
    watcher = watched(0.1, itertools.count().__next__)
    watcher.watch()
    code = """
class Tensor: pass
def barrier():
    tensor = Tensor()
    time.sleep(0.1)
    return weakref.ref(tensor)
"""
    barrier = as_torch(code).barrier
    # The thread may look at the moment of a return, and then a local lives a little longer.
    kept = sum(barrier()() is not None for _ in range(10))
    assert kept <= 3, f"{kept} of 10 were kept"
    watcher.end(next(thread for thread in threading.enumerate() if thread.name == "memtrace-waits"))
    assert all(thread.name != "memtrace-waits" for thread in threading.enumerate())


class Clock:
    """A fake clock: each `wait` adds the next of `steps` (seconds); CPU time grows by a share, `work`."""

    def __init__(self, steps, work=0.0):
        self.now, self.used, self.steps, self.work = 0.0, 0.0, iter(steps), work

    def monotonic(self):
        return self.now

    def process_time(self):
        return self.used

    def wait(self, interval):
        step = next(self.steps, None)
        self.now += step or 0.0
        self.used += (step or 0.0) * self.work
        return step is None


def ends(clock):
    """Returns the times at which the process would be ended while its main thread waits; empty if never."""
    watcher, ended, release = watched(60, lambda: 7), [], threading.Lock()
    watcher.ended = waits.time = clock
    waits.resource = types.SimpleNamespace(
        RUSAGE_SELF=0, getrusage=lambda _: types.SimpleNamespace(ru_majflt=0)
    )

    def end(status):
        ended.append(clock.now)
        raise SystemExit

    waits.os = types.SimpleNamespace(**{**vars(os), "_exit": end})
    code = "def barrier(lock):\n    lock.acquire()"
    release.acquire()

    def look():
        try:
            while watcher.call(threading.main_thread().ident) is None:
                time.sleep(0.01)
            watcher.look()
        finally:
            release.release()

    threading.Thread(target=look).start()
    as_torch(code).barrier(release)
    return ended


def a_process_that_rests_ends_and_a_stopped_or_busy_one_does_not():
    assert ends(Clock([2.0] * 40)) == [64.0]
    assert ends(Clock([2.0] * 20)) == []
    # The process is stopped for an hour, again and again.
    assert ends(Clock(([2.0] * 5 + [3600.0]) * 9)) == []
    assert ends(Clock([2.0] * 40, work=0.5)) == []


def names_of_files_need_no_current_folder():
    relative = compile("import sys\nframe = sys._getframe()", "relative.py", "exec")
    names = {}
    exec(relative, names)
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"memtrace-watcher-{os.getpid()}")
    os.mkdir(folder)
    os.chdir(folder)
    os.rmdir(folder)
    assert not waits.is_of(names["frame"], (waits.OWN_FOLDER,))


locals_of_a_function_end_with_it()
a_process_that_rests_ends_and_a_stopped_or_busy_one_does_not()
names_of_files_need_no_current_folder()
