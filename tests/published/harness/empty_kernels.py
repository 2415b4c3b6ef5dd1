"""Makes Triton compile every kernel to an empty one, which takes a small part of the time.

The simulated GPU runs no kernels. What PyTorch allocates does not depend on their code, except if Inductor
chooses among variants by their spilled registers or shared memory. A case must call `compile_empty_kernels`
before it imports torch, and have a cache folder of its own for Inductor.
"""

from __future__ import annotations

import os
import re

# The types of parameters in PTX, by their type in Triton's code.
TYPES = {"i1": "u8", "i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64", "f32": "f32", "f64": "f64"}


def compile_empty_kernels() -> None:
    # Worker processes would not have the changed compiler.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    from triton.backends.nvidia.compiler import CUDABackend

    def keep_module(self, module, metadata, *options):
        metadata["cluster_dims"] = (1, 1, 1)
        metadata["tensordesc_meta"] = None
        return module

    def write_signature(self, module, metadata, *options):
        metadata.update(shared=0, tmem_size=0, global_scratch_size=0, global_scratch_align=1)
        metadata.update(profile_scratch_size=0, profile_scratch_align=1)
        return str(module)

    def write_ptx(self, module, metadata, options, *arch):
        match = re.search(r"tt\.func public @(\w+)\((.*?)\) attributes", module, re.S)
        assert match, module[:500]
        metadata["name"] = match[1]
        types = re.findall(r"%\w+: (!tt\.ptr|\w+)", match[2])
        parameters = [
            f".param .{TYPES.get(name, 'u64')} p{index}" for index, name in enumerate([*types, "scratch"])
        ]
        return (
            f".version 8.0\n.target sm_90a\n.address_size 64\n"
            f".visible .entry {match[1]}({', '.join(parameters)}) {{ ret; }}\n"
        )

    CUDABackend.make_ttgir = keep_module
    CUDABackend.make_llir = write_signature
    CUDABackend.make_ptx = write_ptx
