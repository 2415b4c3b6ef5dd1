"""Tags the gradients of whole parameters that FSDP1 (`FullyShardedDataParallel`) reduces and then frees, and
the gradients of the rank's own parts.

The other memory of FSDP1 gets its category from FSDP1's scopes (see src/tracer/preload/attribution/fsdp.rs).
These do not name their module, so the modules of a backward's scopes are set here.

A `handle` shards the parameters of one module, in one flat parameter. A `state` is the state of
one FSDP1 wrapper.
"""

from __future__ import annotations

from .native import CATEGORIES, set_sharded_modules
from .paths import path_of
from .storages import tag
from .tags import GRADIENT
from .texts import id_of

UNSHARDED_GRADIENT = CATEGORIES["unsharded_grad"]


def _path_id_of(handle) -> int:
    """Returns the id of the path of the module whose parameters a handle shards, or 0 without a handle."""
    return id_of(path_of(handle._fully_sharded_module)) if handle is not None else 0


def _set_modules(state, handle) -> None:
    """Sets the module of the scopes that follow, and the module whose parameters are gathered ahead."""
    next_handle = state._exec_order_data.get_handle_to_backward_prefetch(handle)
    set_sharded_modules(_path_id_of(handle), _path_id_of(next_handle))


def before_backward(state, _module) -> None:
    """Sets the modules of the scopes in which parameters are gathered for a backward."""
    if state._handle is not None:
        _set_modules(state, state._handle)


def before_reduction(state, handle) -> None:
    """Sets the modules of the scopes in which gradients are reduced, and tags the whole gradient."""
    _set_modules(state, handle)
    gradient = handle.flat_param.grad
    if handle.uses_sharded_strategy and gradient is not None:
        tag(gradient, UNSHARDED_GRADIENT, _path_id_of(handle), 0, set())


def after_reduction(_state, handle) -> None:
    """Tags the gradient of the rank's own part. FSDP1 assigns it to the parameters at the end of the
    backward. Until then it belongs to the module of the handle, so the tag names no module and is weak."""
    reduced = getattr(handle.flat_param, "_saved_grad_shard", None)
    if reduced is not None:
        tag(reduced, GRADIENT, 0, 0, set(), weak=1)


# The hooked functions, in torch 2.6 to 2.15 (see sharding.py).
HOOKED = (
    ("torch.distributed.fsdp._runtime_utils", "_pre_backward_hook", before_backward, None),
    ("torch.distributed.fsdp._runtime_utils", "_post_backward_hook", before_reduction, after_reduction),
)
