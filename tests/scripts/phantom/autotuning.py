"""cuDNN's search for the fastest plan compiles no program on the simulated GPU."""

import ctypes
import json
import os

# Otherwise PyTorch would load programs from its cache on disk in place of compiling them.
os.environ["USE_PYTORCH_KERNEL_CACHE"] = "0"
import torch  # noqa: E402


def programs():
    """Returns how many programs NVRTC compiled so far, and how many it did not have to compile."""
    text = ctypes.create_string_buffer(1 << 16)
    ctypes.CDLL(None).memtrace_phantom_describe(text, len(text))
    about = json.loads(text.value)
    return about["programs_compiled"], about["programs_not_compiled"]


torch.backends.cudnn.benchmark = True
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 7, stride=2, padding=3),
    torch.nn.BatchNorm2d(64),
    torch.nn.ReLU(),
    torch.nn.Conv2d(64, 64, 3, padding=1),
    torch.nn.Conv2d(64, 128, 1, stride=2, bias=False),
)
for dtype in (torch.float32, torch.float16):
    net.to("cuda", dtype)
    net(torch.randn(8, 3, 64, 64, device="cuda", dtype=dtype)).sum().backward()
compiled, skipped = programs()
assert compiled == 0, compiled
# Older versions of cuDNN get one plan, which needs no program.
assert skipped > 0 or torch.backends.cudnn.version() < 90800, skipped

# PyTorch's own programs are compiled.
numbers = torch.arange(100, device="cuda")
torch.gcd(numbers, numbers + 6)
assert programs()[0] > 0
print("ok")
