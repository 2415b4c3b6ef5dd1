"""Names the lines of a script that wait for a rank which does not run, and ends a wait without an end.

- A key of a store that a stand-in set: the line that waited for it. A `get` that would return nothing raises.
- A poll for such a key, or a message received again and again, without work for the GPU in between: raises.
- A call of `torch.distributed` that does not return, while the process rests: ends the process.
"""

import atexit
import os
import resource
import sys
import threading
import time

# Seconds; 0: for ever. As long as the simulated NCCL waits for a real rank.
PATIENCE = 60.0
PATIENCE_VARIABLE = "MEMTRACE_PHANTOM_PATIENCE"
# A wait that takes as long is one that a stand-in ended: it lets other threads of the rank set the key first.
ANSWERED_LATE = 0.15
# The fewest repetitions of one line that count as a loop which waits.
POLLS, MESSAGES = 10, 1000
# The part of one core below which a process rests.
RESTING = 0.1
# The fewest looks in sequence at the same call before the process ends, and the most intervals between two of
# them: a process that was stopped, or a machine without time for it, is no deadlock.
LOOKS, GAP = 4, 3
# Seconds that the interpreter waits at exit for the thread, which needs none.
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


# Later the folder may be another one, or be removed: then `os.path.abspath` raises.
START_FOLDER = current_folder()


def is_of(frame, folders):
    return os.path.normpath(os.path.join(START_FOLDER, frame.f_code.co_filename)).startswith(folders)


def place_of(frame, folders):
    """The innermost line outside of these folders, as `function (file:line)`."""
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
        "Let this rank go on without it, or run all ranks: --ranks all"
    )


class Waits:
    """The waits of this process."""

    def __init__(self, torch_folder, tell_place, launches, error):
        # Lines of the script are outside of PyTorch and of this folder.
        self.inner = (OWN_FOLDER + os.sep, torch_folder + os.sep)
        files = ("distributed_c10d.py", "rendezvous.py", "device_mesh.py", "rpc")
        # Not all of torch.distributed: a launcher waits for its ranks, and a checkpoint for a disk.
        self.waiting = (OWN_FOLDER, *(os.path.join(torch_folder, "distributed", file) for file in files))
        self.tell_place, self.launches, self.error = tell_place, launches, error
        self.patience = patience()
        # Of each line that polls: the launches so far, the last time, the seconds, the number of times.
        self.lines = {}
        # Set when the interpreter exits.
        self.ended = threading.Event()

    def place(self):
        return place_of(sys._getframe(1), self.inner)

    def answered(self, key):
        """Reports the line that waited for a key. Returns where its value is from.

        `own` or `empty`: a stand-in set it in this call, and no line was reported before; else `set`.
        """
        return self.tell_place(self.place(), key)

    def repeated(self, what, least, why):
        """The main thread has done once more what brings nothing new. Raises when it does nothing else."""
        if not self.patience or threading.current_thread() is not threading.main_thread():
            return
        place, now, launches = self.place(), time.monotonic(), self.launches()
        known = self.lines.get((what, place))
        if known is None or known[0] != launches:
            self.lines[what, place] = [launches, now, 0.0, 1]
            return
        # The process may have been stopped since the last time.
        known[2] += min(now - known[1], self.patience / POLLS)
        known[1], known[3] = now, known[3] + 1
        if known[3] >= least and known[2] > 0.9 * self.patience:
            raise self.error(explained(what, place, why))

    def watch(self):
        """Starts to look for a call that does not return, in a thread."""
        if self.patience:
            thread = threading.Thread(target=self.look, name="memtrace-waits", daemon=True)
            thread.start()
            # A thread that wakes while the interpreter is taken down may end the process.
            atexit.register(self.end, thread)

    def end(self, thread):
        self.ended.set()
        thread.join(LAST_LOOK)

    def call(self, thread):
        """The call of `torch.distributed` in which a thread is; None if it is in none.

        Values that tell it from another one; the last two: its function and the line of the script.

        The frame dies with this function: a frame keeps the locals of the program, and so its memory.
        """
        frame = sys._current_frames().get(thread)
        if frame is None or not is_of(frame, self.waiting):
            return None
        innermost = id(frame), frame.f_lasti
        # The outermost function of `torch.distributed` that the script called.
        while frame.f_back is not None and is_of(frame.f_back, self.inner):
            frame = frame.f_back
        # A process that swaps does not rest.
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return *innermost, self.launches(), faults, frame.f_code.co_name, place_of(frame, self.inner)

    def look(self):
        """Ends the process when its main thread rests in one call of `torch.distributed` for too long."""
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
                why = f"and nothing has moved for {self.patience:g} s"
                print(explained(f"`{name}`", place, why), file=sys.stderr, flush=True)
                os._exit(1)
