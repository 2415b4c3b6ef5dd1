"""Finds optimizers that still have the parameters of a model that is gone: no module has these parameters,
and the program has no name for them.

So that no code of the program runs, tables are read with the functions of `dict` and `list`.
"""

from __future__ import annotations

import gc

from .holder_search import referrers_of
from .model_storages import is_known, pointer_of, storages_with_gradient, tensors_below
from .native import block_step
from .reference_paths import Names, dict_of, is_own
from .torch_api import Tensor


class UnusedParameters:
    """The parameters of an optimizer that no module has."""

    def __init__(self, optimizer, in_modules: set[int]) -> None:
        """`in_modules` has the storages of the modules' parameters and buffers."""
        self.optimizer = optimizer
        namespace = dict_of(optimizer) or {}
        state = dict.get(namespace, "state")
        state = state if issubclass(type(state), dict) else {}
        # By the id of a parameter: its state. A parameter's class may have a `__hash__` of its own.
        self._states = {id(parameter): value for parameter, value in list(dict.items(state))}
        groups = dict.get(namespace, "param_groups")
        groups = list(groups) if type(groups) is list else []
        lists = [dict.get(group, "params") for group in groups if issubclass(type(group), dict)]
        lists = [each for each in lists if type(each) is list]
        # The tables of the optimizer that refer to parameters.
        self.tables = [state, *lists]
        held = [*dict.keys(state), *(parameter for each in lists for parameter in each)]
        self.parameters: list = []
        for parameter in {id(each): each for each in held}.values():
            if issubclass(type(parameter), Tensor):
                pointer = pointer_of(parameter)
                if pointer and pointer not in in_modules and is_known(pointer):
                    self.parameters.append(parameter)

    def births(self) -> set[int]:
        """Returns the steps in which these parameters were allocated."""
        return {block_step(pointer_of(parameter)) for parameter in self.parameters}

    def storages(self) -> set[int]:
        """Returns the storages of these parameters, of their gradients and of their state."""
        found: set[int] = set()
        for parameter in self.parameters:
            found.update(storages_with_gradient(parameter))
            found.update(map(pointer_of, tensors_below(self._states.get(id(parameter)))))
        return {pointer for pointer in found if pointer and is_known(pointer)}


def _without_module(modules: list, optimizers: list) -> list[UnusedParameters]:
    """Returns the optimizers that have parameters which no module has. The program may have names for these
    parameters."""
    in_modules: set[int] = set()
    for module in modules:
        namespace = dict_of(module) or {}
        for name in ("_parameters", "_buffers"):
            table = dict.get(namespace, name)
            if table is not None and not issubclass(type(table), dict):
                # A module of TorchScript has its parameters in C++.
                return []
            in_modules.update(map(pointer_of, tensors_below(table)))
    found = [UnusedParameters(optimizer, in_modules) for optimizer in optimizers]
    return [each for each in found if each.parameters]


def unused_optimizers(
    modules: list, optimizers: list, names: Names, excluded: list[int], deadline: float
) -> tuple[list[UnusedParameters], bool]:
    """Returns the optimizers whose parameters are of no module and have no name in the program, each with
    only these parameters, and whether the search for names was complete. `excluded` has the ids of the
    tracer's own objects."""
    # The garbage collector does not know who refers to a frozen object.
    found = _without_module(modules, optimizers) if not gc.get_freeze_count() else []
    wanted = {id(parameter) for each in found for parameter in each.parameters}
    own = [*excluded, id(found), *(id(table) for each in found for table in (each.parameters, *each.tables))]
    pairs = referrers_of(list(wanted), own, deadline)
    if pairs is None:
        return [], False
    pairs = iter(pairs)
    named = {child for parent, child in zip(pairs, pairs) if not is_own(parent)}
    named |= {number for number in wanted if names.variable(number) is not None}
    for each in found:
        each.parameters[:] = [parameter for parameter in each.parameters if id(parameter) not in named]
    return [each for each in found if each.parameters], True
