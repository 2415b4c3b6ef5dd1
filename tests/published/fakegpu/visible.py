"""The devices that a script sees: count, name, total memory, and NVML's view of it."""

import json

import pynvml
import torch

pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
x = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
free, total = torch.cuda.mem_get_info()
used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
print(json.dumps({"devices": torch.cuda.device_count(), "nvml_equals_cuda": int(used == total - free)}))
