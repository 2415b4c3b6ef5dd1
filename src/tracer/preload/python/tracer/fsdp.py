"""Tags the gradients of whole parameters, which FSDP reduces and then frees, and the gradients of the rank's
own parts.

The other memory of FSDP gets its category from FSDP's scopes (see src/tracer/preload/attribution/fsdp.rs).
"""

from __future__ import annotations

import sys

from .failures import count
from .native import CATEGORIES, hook_reduction, is_detailed
from .storages import tag
from .tags import owner_of, tag_gradients_of
from .torch_api import without_torch_function

UNSHARDED_GRADIENT = CATEGORIES["unsharded_grad"]
Function = type(lambda: None)

# By module: the function that reduces gradients in torch 2.6 to 2.15. The program may import the module late.
_not_hooked = {
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": "foreach_reduce",
    "torch.distributed.fsdp._runtime_utils": "_post_backward_hook",
}


def before_reduction(first, second) -> None:
    """Called with the parameters and the gradients of FSDP2, or with the state and the handle of FSDP1."""
    if not is_detailed():
        return
    try:
        with without_torch_function():
            seen: set[int] = set()
            if type(first) is list:
                for parameter, gradient in zip(first, second):
                    owner = owner_of(parameter.sharded_param)
                    path_id, name_id = (owner.path_id, owner.name_id) if owner is not None else (0, 0)
                    tag(gradient, UNSHARDED_GRADIENT, path_id, name_id, seen)
            elif second.uses_sharded_strategy and second.flat_param.grad is not None:
                tag(second.flat_param.grad, UNSHARDED_GRADIENT, 0, 0, seen)
    except Exception as error:
        # The names are private to torch.
        count("gradients that FSDP reduces", error)


def after_reduction(first, second) -> None:
    """Called with the same arguments. FSDP1 assigns its gradients later, at the end of the backward."""
    if type(first) is not list or not is_detailed():
        return
    try:
        with without_torch_function():
            tag_gradients_of([parameter.sharded_param for parameter in first])
    except Exception as error:
        count("gradients that FSDP reduced", error)


def hook_reductions() -> None:
    """Hooks the functions that reduce gradients, as soon as the program has imported FSDP."""
    for module_name in [name for name in _not_hooked if name in sys.modules]:
        name = _not_hooked.pop(module_name)
        # `torch.no_grad` wraps the function, and calls it with `*args, **kwargs`.
        function = getattr(vars(sys.modules[module_name]).get(name), "__wrapped__", None)
        is_hooked = type(function) is Function and hook_reduction(
            function, Function.__basicsize__, before_reduction, after_reduction
        )
        if not is_hooked:
            count("hook of FSDP", LookupError(f"{module_name}.{name}: whole gradients stay temporary"))
