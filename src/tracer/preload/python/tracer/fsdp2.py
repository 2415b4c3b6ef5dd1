"""Tags the gradients of whole parameters that FSDP2 (`fully_shard`) reduces and then frees, and the gradients
of the rank's own parts. The other memory of FSDP2 gets its category from FSDP2's scopes (see
src/tracer/preload/attribution/fsdp.rs)."""

from __future__ import annotations

from .native import CATEGORIES
from .storages import tag
from .tags import owner_of, tag_gradients_of

UNSHARDED_GRADIENT = CATEGORIES["unsharded_grad"]


def before_reduce(parameters, gradients) -> None:
    """Tags the gradients of whole parameters."""
    seen: set[int] = set()
    for parameter, gradient in zip(parameters, gradients):
        owner = owner_of(parameter.sharded_param)
        path_id, name_id = (owner.path_id, owner.name_id) if owner is not None else (0, 0)
        tag(gradient, UNSHARDED_GRADIENT, path_id, name_id, seen)


def after_reduce(parameters, _gradients) -> None:
    """Tags the gradients of the rank's own parts."""
    tag_gradients_of([parameter.sharded_param for parameter in parameters])


# The hooked function, in torch 2.6 to 2.15 (see sharding.py).
HOOKED = (
    ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "foreach_reduce", before_reduce, after_reduce),
)
