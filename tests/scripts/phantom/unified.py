"""Prints what CUDA and NVML report on a machine whose GPU has no memory of its own, as one line of JSON."""

import json
import tempfile
from pathlib import Path

import pynvml
import torch

MIB = 1 << 20
torch.zeros(1, device="cuda")


def cached():
    """Returns the size of the machine's page cache, which other programs change, too."""
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return sizes["Cached"] - sizes["Shmem"] + sizes["Buffers"] + sizes["SReclaimable"]


(start, total), cache = torch.cuda.mem_get_info(), cached()
reported = {"total": total, "integrated": torch.cuda.get_device_properties(0).is_integrated}


def taken():
    """Returns the memory taken since the last call, without what the page cache has taken."""
    global start, cache
    free, held = torch.cuda.mem_get_info()[0], cached()
    more, grown = start - free, held - cache
    start, cache = free, held
    return more - grown


on_device = torch.empty(4096 * MIB, dtype=torch.uint8, device="cuda")
reported["device"] = taken()
on_host = torch.ones(1024 * MIB, dtype=torch.uint8)
reported["host"] = taken()
# Not in /tmp, which may be memory itself.
with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:
    file.write(bytes(512 * MIB))
    file.flush()
    reported["file"] = taken()

pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
for name, ask in [
    ("memory", pynvml.nvmlDeviceGetMemoryInfo),
    ("processes", pynvml.nvmlDeviceGetComputeRunningProcesses),
]:
    try:
        reported[name] = str(ask(card))
    except pynvml.NVMLError as error:
        reported[name] = str(error)
try:
    torch.empty(total, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    reported["error"] = str(error).splitlines()[0]
print(json.dumps(reported))
