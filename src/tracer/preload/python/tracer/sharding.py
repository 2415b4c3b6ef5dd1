"""Hooks functions of the sharding libraries, as soon as the program has imported them: fsdp1.py, fsdp2.py and
deepspeed.py list them, and what runs before and after each call."""

from __future__ import annotations

import sys

from .deepspeed import HOOKED as DEEPSPEED
from .failures import count
from .fsdp1 import HOOKED as FSDP1
from .fsdp2 import HOOKED as FSDP2
from .native import hook_sharding, is_detailed
from .torch_api import Function, without_torch_function

# By the index that `hook_sharding` takes: the module of a function, its qualified name, and the tracer's
# functions that run before and after a call. An entry is removed once its
# module is imported, even if the hook fails.
_not_hooked = dict(enumerate((*FSDP1, *FSDP2, *DEEPSPEED)))


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


def _in_detail(function, place: str):
    """Returns a function that calls `function` in detailed steps only, and counts its exceptions: the
    attributes that it reads are private to the library. Returns None for None."""

    def call(*arguments) -> None:
        if not is_detailed():
            return
        try:
            with without_torch_function():
                function(*arguments)
        except Exception as error:
            count(place, error)

    return call if function is not None else None


def hook_sharding_libraries() -> None:
    """Hooks the functions of the modules that were imported since the last call."""
    # A list of items would have tuples, which go to Python's free list. The program's next tuples would then
    # not count for its garbage collector.
    for index in list(_not_hooked):
        module_name, name, before, after = _not_hooked[index]
        if module_name not in sys.modules:
            continue
        del _not_hooked[index]
        function = _function(module_name, name)
        is_hooked = type(function) is Function and hook_sharding(
            function,
            Function.__basicsize__,
            index,
            _in_detail(before, f"before {name}"),
            _in_detail(after, f"after {name}"),
        )
        if not is_hooked:
            count("hook of a sharding library", LookupError(f"{module_name}.{name}"))
