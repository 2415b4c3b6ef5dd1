"""Reports the lines of a script that wait for a rank that does not run, and ends endless waits.

- A key of a store that a stand-in set: reports the line that waited for it. A `get` that would return an
  empty value raises.
- A poll for such a key, or a message received again and again, without GPU work in between: raises.
- A call of `torch.distributed` that does not return while the process is idle: ends the process.
"""

import atexit
import os
import resource
import sys
import threading
import time

# The time in seconds after which an endless wait ends; 0 disables this. The simulated NCCL waits for a real
# rank equally long.
PATIENCE = 60.0
PATIENCE_VARIABLE = "MEMTRACE_PHANTOM_PATIENCE"
# The time in seconds after which a wait for a key counts as answered late: a stand-in may then have set the
# key. The store gives other threads of the rank a little longer than this to set it.
ANSWERED_LATE = 0.15
# If the script repeats a call at one line at least this often, the line counts as a waiting loop. The first
# number is for polls, the second for received messages.
POLLS, MESSAGES = 10, 1000
# A process that uses less than this share of one core is idle.
RESTING = 0.1
# LOOKS: the minimum number of consecutive checks that must find the same call before the process is ended.
# GAP: the maximum time between two checks, in intervals. After a longer gap, counting starts again, because
# the process was stopped or got no CPU time.
LOOKS, GAP = 4, 3
# The maximum time in seconds for which the exit of the interpreter waits for the thread.
# Normally the thread ends at once.
LAST_LOOK = 1.0
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def patience():
    try:
        return max(float(os.environ.get(PATIENCE_VARIABLE) or PATIENCE), 0.0)
    except ValueError:
        return PATIENCE


def current_folder():
    try:
        return os.getcwd()
    except OSError:  # It was removed.
        return os.sep


# Read now, because the program may change or remove its folder later: then `os.path.abspath` raises.
START_FOLDER = current_folder()


def is_of(frame, folders):
    return os.path.normpath(os.path.join(START_FOLDER, frame.f_code.co_filename)).startswith(folders)


def place_of(frame, folders):
    """Returns the innermost line outside of these folders, as `function (file:line)`."""
    while frame is not None and frame.f_back is not None and is_of(frame, folders):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def rank_of():
    return f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}"


def explained(what, place, why):
    return (
        f"memtrace: deadlock: {rank_of()} waits in {what} at {place}, {why}. The other ranks are stand-ins: "
        "they join every collective and hold what this rank holds, but take no other branch of the script. "
        "Change the script so that this rank does not wait, or run all ranks: --ranks all"
    )


class Waits:
    """Finds the endless waits of this process."""

    def __init__(self, torch_folder, tell_place, launches, error):
        # A line outside of these folders is a line of the script.
        self.inner = (OWN_FOLDER + os.sep, torch_folder + os.sep)
        files = ("distributed_c10d.py", "rendezvous.py", "device_mesh.py", "rpc")
        # Only waits in these files count. Other files of torch.distributed may wait for
        # long without a deadlock: a launcher for its ranks, a checkpoint for a disk.
        self.waiting = (OWN_FOLDER, *(os.path.join(torch_folder, "distributed", file) for file in files))
        self.tell_place, self.launches, self.error = tell_place, launches, error
        self.patience = patience()
        # For each call and line that polls: the number of kernel launches at the last call, the time of that
        # call, and the seconds and the number of calls since the first call with this number of launches.
        self.lines = {}
        # Set when the interpreter exits.
        self.ended = threading.Event()

    def place(self):
        return place_of(sys._getframe(1), self.inner)

    def answered(self, key):
        """Reports the line that waited for a key. Returns the source of the key's value.

        The source is `own` or `empty` if a stand-in set the value in this call and no line was reported
        before; otherwise it is `set`.
        """
        return self.tell_place(self.place(), key)

    def repeated(self, what, least, why):
        """Records a repeated call of the main thread. Raises an error if the thread has repeated the call at
        least `least` times, for most of the patience, without a kernel launch."""
        if not self.patience or threading.current_thread() is not threading.main_thread():
            return
        place, now, launches = self.place(), time.monotonic(), self.launches()
        known = self.lines.get((what, place))
        if known is None or known[0] != launches:
            self.lines[what, place] = [launches, now, 0.0, 1]
            return
        # The process may have been stopped since the last call, so count at most a part of the patience.
        known[2] += min(now - known[1], self.patience / POLLS)
        known[1], known[3] = now, known[3] + 1
        if known[3] >= least and known[2] > 0.9 * self.patience:
            raise self.error(explained(what, place, why))

    def watch(self):
        """Starts a thread that checks for a call that does not return."""
        if self.patience:
            thread = threading.Thread(target=self.look, name="memtrace-waits", daemon=True)
            thread.start()
            # A thread that wakes while the interpreter shuts down may end the process.
            atexit.register(self.end, thread)

    def end(self, thread):
        self.ended.set()
        thread.join(LAST_LOOK)

    def call(self, thread):
        """Returns the call of `torch.distributed` in which a thread is, or None if it is in no such call.

        The result is a tuple that distinguishes the call from others. It ends with the call's function and
        the line of the script. The frame is not kept: a frame keeps the program's locals alive, and so their
        memory.
        """
        frame = sys._current_frames().get(thread)
        if frame is None or not is_of(frame, self.waiting):
            return None
        innermost = id(frame), frame.f_lasti
        # Go up to the outermost frame of torch, which the script called directly.
        while frame.f_back is not None and is_of(frame.f_back, self.inner):
            frame = frame.f_back
        # Include the page faults: a process that swaps makes progress, so it is not idle.
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return *innermost, self.launches(), faults, frame.f_code.co_name, place_of(frame, self.inner)

    def look(self):
        """Ends the process if its main thread is idle in one call of `torch.distributed` for too long."""
        main, interval = threading.main_thread().ident, min(self.patience / 5, 2.0)
        seen, looks = None, 0
        last = since = time.monotonic()
        used = time.process_time()
        while not self.ended.wait(interval):
            now, cpu = time.monotonic(), time.process_time()
            rests = now - last <= GAP * interval and cpu - used <= RESTING * (now - since)
            last = now
            call = self.call(main) if rests else None
            if call is None or call != seen:
                seen, looks, since, used = call, 0, now, cpu
                continue
            looks += 1
            if looks >= LOOKS and now - since > self.patience:
                name, place = call[-2:]
                why = f"and nothing has happened for {self.patience:g} s"
                print(explained(f"`{name}`", place, why), file=sys.stderr, flush=True)
                os._exit(1)
