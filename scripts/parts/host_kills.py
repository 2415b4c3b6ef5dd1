"""Programs that are killed, and what memtrace says about the cause. For scripts/host-corpus."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .host_runs import LONGEST, MIB, group, memtrace, start


@dataclass(frozen=True)
class Kill:
    name: str
    program: str
    by: str  # the true cause, as `killed.by` of the answer
    what: str  # the description in the table
    limit: int = 0  # the limit of the control group in MiB; 0 for no control group
    signal: int | None = None
    send: tuple[signal.Signals, ...] = ()  # the signals to send to the program once it runs
    child: str = ""  # the name of the child that the kernel kills
    rank: int = 0  # the rank of the killed process
    says: str = ""  # a text that the sentences of the verdict must contain


def send(process: subprocess.Popen, signals: tuple[signal.Signals, ...]) -> None:
    """Waits until the program runs, and sends it signals: all except the last one through `memtrace run`."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("READY"):
            break
    time.sleep(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in signals[:-1]:
        os.kill(process.pid, number)
        time.sleep(1)
    os.kill(int(children[0]), signals[-1])


KILLS = [
    Kill("kill-leak", "leak_tensors", "container_oom", "a leak of CPU tensors", 1500, says=" leak_tensors ("),
    Kill("kill-lists", "leak_lists", "container_oom", "a leak of Python lists", 1500),
    Kill("kill-checkpoint", "checkpoint", "container_oom", "checkpoints gathered on the host", 1800),
    Kill("kill-loading", "loads_weights", "container_oom", "loading checkpoints", 1500,
         says="CPU tensors by"),
    Kill("kill-saving", "saves_checkpoint", "container_oom", "saving a checkpoint", 1100,
         says="step 5, checkpoint"),
    Kill("kill-rank", "rank_grows", "container_oom", "a rank of two", 2600, rank=1),
    Kill("kill-address-space", "address_space", "refused", "MemoryError under RLIMIT_AS", says="RLIMIT_AS"),
    Kill("kill-pinned", "pinned_rounding", "container_oom", "pinned memory", 1500),
    Kill("kill-shared", "shared_tensors", "container_oom", "shared memory", 1500),
    Kill("kill-worker", "worker_grows", "", "a DataLoader worker", 2600, child="pt_data_worker"),
    Kill("kill-neighbour", "neighbour", "container_oom", "another process of the container", 2000,
         says="try: end the other processes"),
    Kill("kill-person", "wait", "sent", "SIGKILL by a person", signal=9, send=(signal.SIGKILL,),
         says="Somebody sent it"),
    Kill("kill-scheduler", "wait", "signal", "SIGTERM by a scheduler", signal=15, send=(signal.SIGTERM,)),
    Kill("kill-time-limit", "asked_to_end", "sent", "SIGTERM, then SIGKILL: a scheduler's time limit",
         signal=9, send=(signal.SIGTERM, signal.SIGKILL), says="after SIGTERM had asked it to end"),
    Kill("kill-cputime", "processor_time", "signal", "the limit of processor time", signal=24),
    Kill("kill-watchdog", "watchdog", "signal", "abort(), as NCCL's watchdog", signal=6),
    Kill("kill-shm", "full_shm", "signal", "a full /dev/shm", signal=7),
]  # fmt: skip


def killed(kill: Kill) -> tuple[str, bool]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        limited = stack.enter_context(group(kill.limit * MIB)) if kill.limit else None
        if kill.limit and limited is None:
            return f"| {kill.name} | {kill.what} | left out: no control group can be made here | |", True
        settings = {}
        if kill.program == "full_shm":
            small = folder / "shm"
            small.mkdir()
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=False)
            if mounted.returncode:
                return f"| {kill.name} | {kill.what} | left out: nothing can be mounted here | |", True
            stack.callback(subprocess.run, ["umount", small], check=False)
            settings["SMALL_SHM"] = str(small)
        process = start([kill.program, "--until-killed"], folder / "out", limited, **settings)
        if kill.send:
            send(process, kill.send)
        process.communicate(timeout=LONGEST)
        processes = memtrace("summary", "--json", folder / "out")["processes"]
        verdicts = [(process["rank"], process["killed"]) for process in processes if process["killed"]]
        # A killed worker appears twice: in its own trace, and as `child` in its parent's trace. Keep the
        # verdicts of the kind that this case expects.
        found = [(rank, one) for rank, one in verdicts if bool(one["child"]) == bool(kill.child)]
        if not found:
            return f"| {kill.name} | {kill.what} | no verdict | |", False
        of_kernel = [rank for rank, one in found if one["by"].endswith("_oom")]
        verdict = next((one for rank, one in found if rank == kill.rank), found[0][1])
        sentences = " ".join(verdict["sentences"])
        is_right = verdict["by"] == kill.by and (not kill.signal or verdict["signal"] == kill.signal)
        # No other rank may have a verdict that names an OOM kill.
        is_right = is_right and kill.says in sentences and set(of_kernel) <= {kill.rank}
        if kill.child:
            is_right = verdict["child"].get("name") == kill.child
        answers = memtrace("oom", "--json", folder / "out")["killed"]
        is_right = is_right and any(verdict["sentences"] == answer["sentences"] for answer in answers)
        return f"| {kill.name} | {kill.what} | {'right' if is_right else 'WRONG'} | {sentences} |", is_right
