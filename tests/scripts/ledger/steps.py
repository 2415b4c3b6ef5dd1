"""Holds memory of one kind, and prints the figures of nvidia-smi and the driver at that moment.

    steps.py cublas | cudnn | nccl | graph | expandable

Prints one JSON line; the mark `counted` is in the trace at the same moment.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))
import memtrace  # noqa: E402

how = sys.argv[1]
kept = [torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")]
if how == "cublas":
    square = torch.ones(2048, 2048, device="cuda")
    kept += [square @ square, square.half() @ square.half()]
elif how == "cudnn":
    layer = torch.nn.Conv2d(64, 128, 3, padding=1).cuda()
    out = layer(torch.zeros(16, 64, 112, 112, device="cuda"))
    out.sum().backward()
    kept += [layer, out]
elif how == "nccl":
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    dist.all_reduce(kept[0])
    kept.append(dist)
elif how == "graph":
    inner = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (inner * 2).sum()
    graph.replay()
    kept += [graph, result]
elif how == "expandable":
    kept += [torch.zeros(n << 20, dtype=torch.uint8, device="cuda") for n in (3, 50, 200)]
    kept.pop(1)
else:
    sys.exit(__doc__)
torch.cuda.synchronize()


def smi(query, *more):
    """Returns the lines of a query of nvidia-smi, or None if it is not installed."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", *more, f"--query-{query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().splitlines() if done.returncode == 0 else None


uuid = (
    str(torch.cuda.get_device_properties(0).uuid)
    if hasattr(torch.cuda.get_device_properties(0), "uuid")
    else None
)
device = ["-i", f"GPU-{uuid}"] if uuid else []
assert memtrace.flush(), "the trace could not be brought up to date"
free, total = torch.cuda.mem_get_info()
used = smi("gpu=memory.used", *device)
own = [
    line.split(",")[1]
    for line in smi("compute-apps=pid,used_memory", *device) or []
    if line.split(",")[0].strip() == str(os.getpid())
]
memtrace.mark("counted")
print(
    json.dumps(
        {
            "total": total,
            "free": free,
            "smi_used_mib": int(used[0]) if used and used[0].strip().isdigit() else None,
            "smi_own_mib": int(own[0]) if own and own[0].strip().isdigit() else None,
        }
    ),
    flush=True,
)
if how == "nccl":
    dist.destroy_process_group()
