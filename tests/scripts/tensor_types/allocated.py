"""Makes large tensors in many ways, and runs out of memory.

Prints as JSON the address of each tensor's memory with its type and shape, as in the trace. `?` is the shape
of memory that its tensor does not fill, or that no tensor of this shape was made for.
"""

from __future__ import annotations

import contextlib
import json
import threading

import torch

kept: dict[int, tuple[list[str], object]] = {}


def keep(tensor: torch.Tensor, dtype: str = "", shape: str = "") -> torch.Tensor:
    own = "[" + "x".join(map(str, tensor.shape)) + "]"
    address = tensor.untyped_storage().data_ptr()
    assert address not in kept
    kept[address] = ([dtype or str(tensor.dtype).removeprefix("torch."), shape or own], tensor)
    return tensor


def small_after_large():
    """The form of a large tensor must not pass to memory that is allocated next."""
    keep(torch.empty(1000, device="cuda"), "?", "?")


types = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
others = ["complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
for name in [*types, *(name for name in others if hasattr(torch, name))]:
    keep(torch.empty(512, 4, 1024, dtype=getattr(torch, name), device="cuda"))
    small_after_large()
x = keep(torch.randn(1024, 512, device="cuda"))
keep(x + 1)
keep(x > 0, "?", "?")  # 512 KiB
keep(torch.cat([x, x]) > 0)
keep((x @ x.t()).bfloat16())
keep(torch.empty_like(x.expand(2, -1, -1), memory_format=torch.contiguous_format))
keep(torch.empty_strided((1024, 512), (1, 1024), device="cuda"))
keep(torch.empty_strided((1024, 512), (1024, 1), device="cuda"), "float32", "?")
keep(torch.empty((2, 4, 256, 256), device="cuda").to(memory_format=torch.channels_last))
keep(torch.empty(*[2] * 9, 1024, device="cuda"), "float32", "?")
# A resized storage has no tensor of its own shape.
keep(torch.empty(0, device="cuda").resize_(1024, 1024), "?", "?")
keep(torch.nn.functional.pad(x, (0, 8)))
thread = threading.Thread(target=lambda: keep(torch.empty(333, 1025, device="cuda")))
thread.start()
thread.join()
# A size that fails its checks is not allocated, and leaves nothing for the next tensor.
for sizes in [(-1, 1 << 20), (-1024, -1024), (1 << 40, 1 << 40)]:
    with contextlib.suppress(RuntimeError):
        torch.empty(sizes, device="cuda")
    small_after_large()
with contextlib.suppress(RuntimeError):
    torch.empty_strided((1024, 1024), (1024,), device="cuda")
small_after_large()
with contextlib.suppress(RuntimeError):
    torch.empty_strided((2048, 2048), (-1, 4096), device="cuda")
small_after_large()
with contextlib.suppress(torch.OutOfMemoryError):
    torch.empty(1 << 10, 3, 1 << 24, dtype=torch.bfloat16, device="cuda")
small_after_large()
print(json.dumps({str(address): form for address, (form, _) in kept.items()}))
