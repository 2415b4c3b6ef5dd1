"""Tags the gradients of whole parameters, which FSDP reduces and then frees, and the gradients of the rank's
own parts.

The other memory of FSDP gets its category from FSDP's scopes (see
src/tracer/preload/attribution/fsdp.rs). The scopes of FSDP1 do not name their module, so the modules of a
backward's scopes are set here.
"""

from __future__ import annotations

import sys
import weakref

from .failures import count
from .native import CATEGORIES, hook_reduction, is_detailed, set_sharded_modules
from .paths import path_of, table_by_module
from .storages import tag
from .tags import GRADIENT, owner_of, tag_gradients_of
from .texts import id_of
from .torch_api import Function, without_torch_function

UNSHARDED_PARAMETER = CATEGORIES["unsharded_param"]
UNSHARDED_GRADIENT = CATEGORIES["unsharded_grad"]

# By module: the functions that reduce gradients, and the function that gathers FSDP1's parameters for a
# backward, in torch 2.6 to 2.15. The program may import the module late.
_not_hooked = {
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": ("foreach_reduce",),
    "torch.distributed.fsdp._runtime_utils": ("_pre_backward_hook", "_post_backward_hook"),
    "deepspeed.runtime.zero.partition_parameters": ("AllGatherCoalescedHandle.wait",),
}


def _path_id_of(handle) -> int:
    """Returns the id of the path of the module that a handle of FSDP1 shards, or 0 without a handle."""
    return id_of(path_of(handle._fully_sharded_module)) if handle is not None else 0


def before_reduction(first, second=None) -> None:
    """Called with the parameters and the gradients of FSDP2, and with a handle of DeepSpeed. For FSDP1,
    called with its state and the module before a backward, and with its state and the handle before a
    reduction."""
    if not is_detailed():
        return
    try:
        with without_torch_function():
            seen: set[int] = set()
            if isinstance(first, (list, tuple)):
                for parameter, gradient in zip(first, second):
                    owner = owner_of(parameter.sharded_param)
                    path_id, name_id = (owner.path_id, owner.name_id) if owner is not None else (0, 0)
                    tag(gradient, UNSHARDED_GRADIENT, path_id, name_id, seen)
            elif second is not None and first._handle is not None:
                handle = first._handle
                path_id = _path_id_of(handle)
                next_handle = first._exec_order_data.get_handle_to_backward_prefetch(handle)
                set_sharded_modules(path_id, _path_id_of(next_handle))
                gradient = handle.flat_param.grad
                if second is handle and handle.uses_sharded_strategy and gradient is not None:
                    tag(gradient, UNSHARDED_GRADIENT, path_id, 0, seen)
    except Exception as error:
        # The names are private to torch.
        count("gradients that FSDP reduces", error)


def after_reduction(first, second=None) -> None:
    """Called with the same arguments. DeepSpeed has copied each gathered parameter into a block of its own.
    FSDP1 assigns its gradients to the parameters later, at the end of the backward. Until then they belong to
    the module of the handle."""
    if not is_detailed():
        return
    try:
        with without_torch_function():
            if isinstance(first, (list, tuple)):
                tag_gradients_of([parameter.sharded_param for parameter in first])
            elif second is None:
                for parameter in first.params:
                    owner = owner_of(parameter)
                    if owner is not None:
                        tag(parameter, UNSHARDED_PARAMETER, owner.path_id, owner.name_id, set())
            elif second is first._handle:
                reduced = getattr(second.flat_param, "_saved_grad_shard", None)
                if reduced is not None:
                    tag(reduced, GRADIENT, 0, 0, set(), weak=1)
    except Exception as error:
        count("gradients that FSDP reduced", error)


# By id(engine): the called engines of DeepSpeed.
_engines: dict[int, weakref.ref] = table_by_module()


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


def _function(module_name: str, name: str):
    """Returns the function with this qualified name that its decorators call (`torch.no_grad`, DeepSpeed's
    `instrument_w_nvtx`), or None. A decorator calls it with `*args, **kwargs`, which every Python hooks."""
    found = sys.modules[module_name]
    for part in name.split("."):
        found = vars(found).get(part)
        if found is None:
            return None
    cells = getattr(found, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells if type(cell.cell_contents) is Function]
    return getattr(found, "__wrapped__", inside[0] if len(inside) == 1 else found)


def hook_reductions() -> None:
    """Hooks the functions, as soon as the program has imported them."""
    for module_name in [name for name in _not_hooked if name in sys.modules]:
        for name in _not_hooked.pop(module_name):
            function = _function(module_name, name)
            is_hooked = type(function) is Function and hook_reduction(
                function, Function.__basicsize__, before_reduction, after_reduction
            )
            if not is_hooked:
                count("hook of a sharding library", LookupError(f"{module_name}.{name}"))
