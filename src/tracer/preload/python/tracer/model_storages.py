"""Finds the storages that a search leaves out, and the storages of copies of models.

So that no code of the program runs, tables are read with the functions of `dict` and `list`.
"""

from __future__ import annotations

from .class_table import ClassTable
from .graphs import Base, bases_of, namespace_of_type
from .native import block_step
from .reference_paths import SEQUENCES, dict_of
from .torch_api import Module, Tensor

# What `block_step` returns for an address that is in no live block.
UNKNOWN = -2
# Models of one class that were made during training count as copies from this number on.
FEWEST_COPIES = 2

address_of = getattr(Base, "const_data_ptr", None) or Base.data_ptr
offset_of, item_size = Base.storage_offset, Base.element_size
gradient_of, is_leaf = Base.grad.__get__, Base.is_leaf.__get__


def _find_is_plain(kind: type) -> bool:
    owner = next((base for base in bases_of(kind) if "__torch_dispatch__" in namespace_of_type(base)), Base)
    return owner is Tensor or owner is Base


# True for a class whose tensors have memory of their own, unlike a fake tensor or a wrapper around other
# tensors.
IS_PLAIN = ClassTable(_find_is_plain)


def pointer_of(tensor) -> int:
    """Returns the start address of a tensor's storage, or 0 if it has no storage."""
    if not IS_PLAIN[type(tensor)]:
        return 0
    try:
        return address_of(tensor) - offset_of(tensor) * item_size(tensor)
    except Exception:
        # The tensor is sparse, functional or not initialized.
        return 0


def is_known(pointer: int) -> bool:
    """Returns True if an address is in a live block of the trace."""
    return block_step(pointer) != UNKNOWN


def tensors_below(value, depth: int = 4):
    """Yields the tensors in a value, and in the dicts and sequences down to `depth` levels below it."""
    kind = type(value)
    if issubclass(kind, Tensor):
        yield value
    elif depth and issubclass(kind, dict):
        for item in list(dict.values(value)):
            yield from tensors_below(item, depth - 1)
    elif depth and kind in SEQUENCES:
        for item in list(value):
            yield from tensors_below(item, depth - 1)


def storages_with_gradient(tensor) -> set[int]:
    """Returns the storages of a tensor and of its gradient."""
    gradient = gradient_of(tensor) if is_leaf(tensor) else None
    return {pointer_of(each) for each in (tensor, gradient) if each is not None}


def owned_storages(modules: list, optimizers: list) -> set[int]:
    """Returns the storages of parameters, buffers, gradients and optimizer state, by their addresses."""
    found: set[int] = set()
    for module in modules:
        namespace = dict_of(module) or {}
        for table in ("_parameters", "_buffers"):
            for tensor in tensors_below(dict.get(namespace, table)):
                found |= storages_with_gradient(tensor)
    for optimizer in optimizers:
        namespace = dict_of(optimizer) or {}
        for table in ("state", "param_groups"):
            for tensor in tensors_below(dict.get(namespace, table)):
                found |= storages_with_gradient(tensor)
        state = dict.get(namespace, "state")
        for parameter in list(dict.keys(state)) if issubclass(type(state), dict) else ():
            if issubclass(type(parameter), Tensor):
                found |= storages_with_gradient(parameter)
    return found


def _children(module) -> list:
    table = dict.get(dict_of(module) or {}, "_modules")
    values = list(dict.values(table)) if issubclass(type(table), dict) else []
    return [child for child in values if issubclass(type(child), Module)]


def _storages_of_model(root) -> set[int]:
    """Returns the live storages of a model's parameters and buffers."""
    found: set[int] = set()
    pending, seen = [root], {id(root)}
    for module in pending:
        namespace = dict_of(module) or {}
        for table in ("_parameters", "_buffers"):
            found.update(pointer_of(tensor) for tensor in tensors_below(dict.get(namespace, table)))
        inside = [child for child in _children(module) if id(child) not in seen]
        seen.update(map(id, inside))
        pending += inside
    return {pointer for pointer in found if pointer and is_known(pointer)}


def model_copies(searched, modules: list, optimizers: list) -> tuple[dict, dict[int, set[int]]]:
    """Returns the copies of models that the program has made during training: the models, and their storages,
    by `id`. A copy is one of several models of a class that no optimizer trains and no other module has.
    `searched` yields the modules until the time is over."""
    inside = {id(child) for module in modules for child in _children(module)}
    trained: set[int] = set()
    for optimizer in optimizers:
        groups = dict.get(dict_of(optimizer) or {}, "param_groups")
        trained.update(pointer_of(tensor) for tensor in tensors_below(groups))
    storages: dict[int, set[int]] = {}
    by_class: dict[type, list] = {}
    for root in searched:
        if id(root) in inside:
            continue
        found = _storages_of_model(root)
        if found and not found & trained and min(map(block_step, found)) >= 0:
            storages[id(root)] = found
            by_class.setdefault(type(root), []).append(root)
    copies = {id(root): root for roots in by_class.values() if len(roots) >= FEWEST_COPIES for root in roots}
    return copies, {number: storages[number] for number in copies}
