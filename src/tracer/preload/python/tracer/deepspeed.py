"""Tags the parameters that DeepSpeed's ZeRO 3 gathers, and the buckets in which ZeRO 1 and 2 collect
gradients. Other memory of DeepSpeed gets its category from DeepSpeed's ranges (see src/trace/ranges.rs)."""

from __future__ import annotations

import weakref

from .native import CATEGORIES
from .paths import path_of, table_by_module
from .storages import tag
from .tags import GRADIENT, owner_of
from .texts import id_of

UNSHARDED_PARAMETER = CATEGORIES["unsharded_param"]

# By id(engine): the called engines.
_engines: dict[int, weakref.ref] = table_by_module()


def after_gather(handle, *_) -> None:
    """Tags the gathered parameters, which DeepSpeed has copied into a block each."""
    for parameter in handle.params:
        owner = owner_of(parameter)
        if owner is not None:
            tag(parameter, UNSHARDED_PARAMETER, owner.path_id, owner.name_id, set())


# The hooked function (see sharding.py).
HOOKED = (
    ("deepspeed.runtime.zero.partition_parameters", "AllGatherCoalescedHandle.wait", None, after_gather),
)


def engine_is_called(root) -> None:
    """Keeps a reference to a root that is an engine of DeepSpeed."""
    if type(root).__name__ == "DeepSpeedEngine" and id(root) not in _engines:
        _engines[id(root)] = weakref.ref(root)


def tag_buckets() -> None:
    """Tags the buffers in which ZeRO 1 and 2 collect gradients. Each backward allocates new ones."""
    for reference in _engines.values():
        engine = reference()
        optimizer = vars(engine).get("optimizer") if engine is not None else None
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            buffers = getattr(bucket, "buffer", None)
            for buffer in buffers if type(buffers) is list else ():
                tag(buffer, GRADIENT, id_of(path_of(engine)), id_of("bucket"), set())
