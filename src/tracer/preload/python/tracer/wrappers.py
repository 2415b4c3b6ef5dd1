"""Finds wrappers around models, and the names in module paths that come from them.

A model keeps its paths when it is wrapped: `GPT.h.0` has the same path inside DistributedDataParallel, unless
`MEMTRACE_WRAPPERS=1` asks for the wrappers' names too.
"""

from __future__ import annotations

from .native import KEEP_WRAPPERS

# By the class of a wrapper: the name of the child that is the model. PEFT has two
# wrappers, one inside the other.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "_FabricModule": "_forward_module",
}
# Names of children of wrappers, also of wrappers that are unknown here. They are left out anywhere in a path.
# A class of the program may also have a child `module`. Its paths then lack this name, too, unless
# `MEMTRACE_WRAPPERS=1` is set.
WRAPPER_PARTS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)
if KEEP_WRAPPERS:
    WRAPPERS, WRAPPER_PARTS = {}, frozenset()

# By class: the name of the child that is the model, or None for a class that is not a wrapper.
_model_part: dict[type, str | None] = {}


def class_name(module) -> str:
    """Returns the name of a module's class as it is in paths."""
    kind = type(module)
    name = kind.__name__
    # fully_shard gives the module a subclass of its own class.
    is_fsdp = name.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    return name[4:] if is_fsdp and not KEEP_WRAPPERS else name


def model_part(module) -> str | None:
    """Returns the name of the child that is the model, or None if the module is not a wrapper."""
    kind = type(module)
    if kind not in _model_part:
        names = [WRAPPERS[base.__name__] for base in kind.__mro__ if base.__name__ in WRAPPERS]
        _model_part[kind] = names[0] if names else None
    return _model_part[kind]


def unwrap(module):
    """Returns the model inside a wrapper, and the names of the children that lead to it."""
    parts = []
    while True:
        part = model_part(module)
        inner = vars(module).get("_modules", {}).get(part) if part is not None else None
        if inner is None:
            return module, parts
        parts.append(part)
        module = inner


def join(path: str, name: str) -> str:
    """Returns the path of the module `name` (a dotted name, or empty) below `path`,
    without names of wrappers."""
    parts = [part for part in name.split(".") if part not in WRAPPER_PARTS] if name else []
    return ".".join([path, *parts])
