"""Waits for what another rank would do. The first argument names the way."""

import os
import sys
import time

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
torch.ones(1, device="cuda")
kind = sys.argv[1]
if kind == "get":
    store.get("ready")  # get
elif kind == "check":
    while not store.check(["ready"]):  # check
        time.sleep(0.01)
elif kind == "recv":
    flag, group = torch.zeros(1), dist.new_group(backend="gloo")
    while flag.item() == 0:
        dist.recv(flag, src=1, group=group)  # recv
elif kind == "blocked":
    # A backend that no stand-in knows.
    code = "def barrier():\n    import time\n    time.sleep(600)"
    exec(compile(code, dist.distributed_c10d.__file__, "exec"))
    barrier()  # blocked # noqa: F821
elif kind == "served":
    store.wait(["ready"])  # served
    # The wait returned without a value, so these reads return, too, however long that takes.
    assert store.get("ready") == b"" and store.multi_get(["ready", "ready"]) == [b"", b""]
    os.environ["MEMTRACE_PHANTOM_STORE"], port = "1", os.environ["MEMTRACE_PHANTOM_STORE"]
    store.wait(["then/nobody/listens"])
    os.environ["MEMTRACE_PHANTOM_STORE"] = port
    store.set(f"part/{rank}", "mine")
    assert [store.get(f"part/{other}") for other in range(dist.get_world_size())] == [b"mine"] * 4
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.barrier(pair)
        dist.recv(torch.zeros(1, device="cuda"), src=1)
dist.destroy_process_group()
