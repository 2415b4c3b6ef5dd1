"""Finds wrappers around models, and the names in module paths that come from them.

A model keeps its paths when it is wrapped: `GPT.h.0` has the same path inside DistributedDataParallel, unless
`MEMTRACE_WRAPPERS=1` asks for the wrappers' names too.
"""

from __future__ import annotations

from .class_table import ClassTable
from .native import KEEP_WRAPPERS

# The name of the child that is the model in torch's data-parallel wrappers and in many others.
DATA_PARALLEL_CHILD = "module"
# By the class of a wrapper: the name of the child that is the model. PEFT has two
# wrappers, one inside the other.
WRAPPERS = {
    "DistributedDataParallel": DATA_PARALLEL_CHILD,
    "DataParallel": DATA_PARALLEL_CHILD,
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "_FabricModule": "_forward_module",
}
# Names of children of wrappers, also of wrappers that are unknown here. They are left out anywhere in a path.
# A class of the program may also have a child with the name DATA_PARALLEL_CHILD. Its paths then lack this
# name, too, unless `MEMTRACE_WRAPPERS=1` is set.
WRAPPER_PARTS = frozenset((DATA_PARALLEL_CHILD, "_orig_mod", "_fsdp_wrapped_module"))
WRAPPER_PARTS |= {"_checkpoint_wrapped_module", "_forward_module"}
if KEEP_WRAPPERS:
    WRAPPERS, WRAPPER_PARTS = {}, frozenset()


def class_name(kind: type) -> str:
    """Returns the name of a class of modules as it is in paths."""
    name = kind.__name__
    # fully_shard gives the module a subclass of its own class.
    is_fsdp = name.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    return name[4:] if is_fsdp and not KEEP_WRAPPERS else name


def _find_child_with_model(kind: type) -> str | None:
    names = (WRAPPERS[base.__name__] for base in kind.__mro__ if base.__name__ in WRAPPERS)
    return next(names, None)


# By class: the name of the child that is the model, or None if the class is not a wrapper.
_CHILD_WITH_MODEL = ClassTable(_find_child_with_model)


def unwrap(root):
    """Returns the model inside a root that may be a wrapper, and the names of the children that lead to it.
    A wrapper may be inside another one."""
    model, names = root, []
    while True:
        name = _CHILD_WITH_MODEL[type(model)]
        child = vars(model).get("_modules", {}).get(name) if name is not None else None
        if child is None:
            return model, names
        names.append(name)
        model = child


def join(path: str, name: str) -> str:
    """Returns the path of the module `name` (a dotted name, or empty) below `path`,
    without names of wrappers."""
    parts = [part for part in name.split(".") if part not in WRAPPER_PARTS] if name else []
    return ".".join([path, *parts])
