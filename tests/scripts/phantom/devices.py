"""Uses several simulated GPUs; run with MEMTRACE_PHANTOM=4xt4 and any CUDA_VISIBLE_DEVICES."""

import ctypes
import json
import os

import torch

visible = os.environ.get("CUDA_VISIBLE_DEVICES")
expected = 4 if visible is None else len([part for part in visible.split(",") if part])
assert torch.cuda.device_count() == expected, torch.cuda.device_count()
if expected == 0:
    assert not torch.cuda.is_available()
    print("ok")
    raise SystemExit
names = {torch.cuda.get_device_name(index) for index in range(expected)}
assert names == {"Tesla T4"} and torch.cuda.get_device_capability(expected - 1) == (7, 5)
assert not torch.cuda.is_bf16_supported(including_emulation=False)

kept = []
for index in range(expected):
    before = torch.cuda.mem_get_info(index)
    kept.append(torch.arange(1000, device="cpu").to(f"cuda:{index}"))
    kept.append(torch.empty((index + 1) * 20 << 20, dtype=torch.uint8, device=f"cuda:{index}"))
    after = torch.cuda.mem_get_info(index)
    assert before[0] - after[0] == torch.cuda.memory_reserved(index) == 2 + (index + 1) * 20 << 20
    assert kept[-1].get_device() == index and kept[-2].cpu().tolist() == list(range(1000))
# Copy from one device to another.
last = expected - 1
assert kept[0].to(f"cuda:{last}").tolist() == list(range(1000))
assert torch.cuda.can_device_access_peer(0, last) or last == 0
with torch.cuda.device(last):
    assert torch.cuda.current_device() == last and torch.empty(1, device="cuda").get_device() == last
model = torch.nn.DataParallel(torch.nn.Linear(64, 64).cuda())
model(torch.randn(32, 64, device="cuda")).sum().backward()
# The cards fill up independently.
try:
    torch.empty(16 << 30, dtype=torch.uint8, device=f"cuda:{last}")
except torch.OutOfMemoryError as error:
    assert f"GPU {last} has a total capacity of 14.74 GiB" in str(error), error
else:
    raise AssertionError("16 GiB fitted into a T4")

library = ctypes.CDLL("libcuda.so.1")
length = library.memtrace_phantom_describe(None, 0)
buffer = ctypes.create_string_buffer(length + 100)
library.memtrace_phantom_describe(buffer, len(buffer))
about = json.loads(buffer.value)
assert (about["card"], about["count"], about["cc"]) == ("t4", 4, "7.5") and about[
    "capacity_bytes"
] == 15095 << 20, about
assert about["invented_reads"] >= 0 and about["assumptions"]["dynamic"] == "full" and "guessed_calls" in about
short = ctypes.create_string_buffer(10)
assert library.memtrace_phantom_describe(short, 10) >= length - 20 and len(short.value) == 9
print("ok")
