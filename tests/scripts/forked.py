"""Runs the cases of a script in children of one process, which imports torch once for all of them."""

import gc
import os
import sys


def group(case):
    """Returns arguments of `init_process_group`: keys of its own for a case, in the store of torchrun.

    Without a case there are no arguments.
    """
    from torch import distributed

    if not case:
        return {}
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, False)
    return {"store": distributed.PrefixStore(case, store), "rank": rank, "world_size": ranks}


def each(cases, is_frozen=False):
    """Returns each case in a forked child of its own, which first prints the case and its process id.

    The parent waits for each child and ends after the last one. A single case runs without a fork. With
    `is_frozen` the objects of the parent are hidden from the collector of the children: a test of what
    memtrace finds among all objects must not set it.
    """
    if len(cases) == 1:
        return cases[0]
    if is_frozen:
        # Otherwise the last collection of each child visits all of torch, which takes a second.
        gc.freeze()
    for case in cases:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            # One write, because several ranks may print into the same pipe.
            sys.stdout.write(f"== {case} {os.getpid()}\n")
            sys.stdout.flush()
            if "MEMTRACE_TEST_CHECKPOINTS" in os.environ:
                os.environ["MEMTRACE_TEST_CHECKPOINTS"] += f".{case}"  # a file of its own for verify.py
            return case
        status = os.waitpid(child, 0)[1]
        if status:
            sys.exit(f"{case}: status {status}")
    sys.exit()
