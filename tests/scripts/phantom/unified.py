"""What CUDA and NVML say on a machine whose GPU has no memory of its own. Prints one line of JSON."""

import json
import tempfile

import pynvml
import torch

MIB = 1 << 20
torch.zeros(1, device="cuda")
start, total = torch.cuda.mem_get_info()
told = {"total": total, "integrated": torch.cuda.get_device_properties(0).is_integrated}


def taken():
    """What was free at the last call, and is not now."""
    global start
    before, (start, _) = start, torch.cuda.mem_get_info()
    return before - start


on_device = torch.empty(4096 * MIB, dtype=torch.uint8, device="cuda")
told["device"] = taken()
on_host = torch.ones(1024 * MIB, dtype=torch.uint8)
told["host"] = taken()
with tempfile.TemporaryFile() as file:
    file.write(bytes(512 * MIB))
    file.flush()
    told["file"] = taken()

pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
for name, ask in [
    ("memory", pynvml.nvmlDeviceGetMemoryInfo),
    ("processes", pynvml.nvmlDeviceGetComputeRunningProcesses),
]:
    try:
        told[name] = str(ask(card))
    except pynvml.NVMLError as error:
        told[name] = str(error)
try:
    torch.empty(total, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    told["error"] = str(error).splitlines()[0]
print(json.dumps(told))
