"""Starts child processes in the way that argv[1] names, and allocates on the device before and after.

Only this process calls `checkpoint()`: its trace must be complete whatever its children do.
"""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch


def allocate(count=5):
    return [torch.empty(1000 * (i + 1), dtype=torch.uint8, device="cuda") for i in range(count)]


def child():
    kept = allocate()
    print("child", torch.cuda.memory_allocated(), flush=True)
    del kept


def forked(work):
    """Forks a child that does `work` and ends; returns its exit status."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def processes(method):
    context = multiprocessing.get_context(method)
    started = [context.Process(target=child) for _ in range(2)]
    for process in started:
        process.start()
        process.join()
    print([process.exitcode for process in started])


def fork_while_threads_allocate():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            allocate()
            time.sleep(0.001)  # keeps the load low: this tests forks

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    print({forked(lambda: None) for _ in range(30)})
    stop.set()
    for thread in threads:
        thread.join()


def loader():
    data = torch.utils.data.TensorDataset(torch.ones(64, 10))
    batches = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, pin_memory=True)
    print(sum(len(batch.to("cuda", non_blocking=True)) for (batch,) in batches))


def main():
    how = sys.argv[1]
    if how == "fork first":  # before the first use of CUDA, so the child may use the device
        print(forked(child))
    kept = allocate(20)
    if how == "fork":
        print(forked(lambda: None))
    elif how == "fork while threads allocate":
        fork_while_threads_allocate()
    elif how in ("spawn", "forkserver"):
        processes(how)
    elif how == "subprocess":
        print(subprocess.run([sys.executable, __file__, "child"], stdout=subprocess.PIPE).stdout)
    elif how == "shell":
        print(os.system("true"))
    elif how == "loader":
        loader()
    kept += allocate(7)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
    from checkpoints import checkpoint

    checkpoint("end")


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child()
    else:
        main()
