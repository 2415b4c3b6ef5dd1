"""FlashAttention 3 for scripts that get it from a hub, with `kernels.get_kernel`.

The operators are those of xformers' wheel, which contains FlashAttention's C++ code and kernels. The Python
interface is the file of FlashAttention's repository.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

from harness.pinned import read_pinned

REPOSITORY = "Dao-AILab/flash-attention"
# The interface with support for torch.compile, as of September 2025. The hub's builds are from that month.
COMMIT = "f174bd6f464eca35139de1402c3c885a6db5f123"
INTERFACE = ("hopper/flash_attn_interface.py", "6ec8b2605697ea15c649ce004a4d24da480e459e")
HEAD_SIZES = (64, 96, 128, 192, 256)


def provide_kernels() -> None:
    """Makes `kernels.get_kernel(NAME).flash_attn_interface` the interface of FlashAttention 3."""
    provide("kernels", get_kernel=get_kernel)


def get_kernel(name: str, **options: object) -> types.SimpleNamespace:
    import torch

    spec = importlib.util.find_spec("xformers")
    assert spec and spec.submodule_search_locations, "flash_attention_3 needs xformers among the libraries"
    torch.ops.load_library(f"{spec.submodule_search_locations[0]}/flash_attn_3/_C.so")
    provide("flash_attn_3", _C=provide("flash_attn_3._C"))
    flags = {f"FLASHATTENTION_DISABLE_HDIM{size}": False for size in HEAD_SIZES}
    provide("flash_attn_config", CONFIG={"build_flags": flags})

    folder = Path("flash_attention").resolve()
    folder.mkdir()
    (folder / "flash_attn_interface.py").write_text(read_pinned(REPOSITORY, COMMIT, *INTERFACE))
    sys.path.append(str(folder))
    interface = importlib.import_module("flash_attn_interface")
    # The wheel's operator also returns the three gradients, which the interface passed to it.
    operators = torch.ops.flash_attn_3
    interface.flash_attn_3_cuda = types.SimpleNamespace(
        fwd=operators.fwd, bwd=lambda *arguments: operators.bwd(*arguments)[3:]
    )
    return types.SimpleNamespace(flash_attn_interface=interface)


def provide(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module
