"""Finds models and optimizers that were never called, among the live objects.

A model that is never called (a copy that averages the weights, a frozen teacher) also holds parameters. After
an OOM, the search also finds models that were still being loaded.
"""

from __future__ import annotations

from .failures import count
from .held import tag_engines
from .live_objects import children, live_objects, outermost_module
from .model_facts import note_bytes_on_cpu, note_optimizer, note_without_optimizer
from .paths import assign_paths, has_path, path_of
from .storages import is_traced, tag
from .tags import (
    BUFFER,
    PARAMETER,
    add_parameters,
    owner_of,
    parameters_of,
    tag_gradients_of,
    tag_model,
    tag_state_of,
)
from .torch_api import Module, Optimizer, Tensor, without_torch_function

# The number of searches left for OOMs.
_oom_searches_left = 4
# The number of calls of `name_parameters` with an unknown parameter, and of `add_groups`.
_namings = _additions = 0


def is_due(number: int) -> bool:
    """Returns True for 1, 2, 3, 10, 30, 100, 300 and so on."""
    return number <= 3 or str(number).rstrip("0") in ("1", "3")


def is_time_to_search(calls: int) -> bool:
    """Returns True if a model's call with this number starts a search: the 3rd, the 100th, the 1000th and so
    on. A search takes as long as one or two calls."""
    return calls == 3 or (calls >= 100 and is_due(calls) and str(calls)[0] == "1")


def _is_initialized(module) -> bool:
    return "_modules" in vars(module)


def _has_unknown(root) -> bool:
    """Returns True if a root has traced parameters without a name, because the root was never called or
    the parameters are new."""
    return any(is_traced(parameter) and owner_of(parameter) is None for parameter in root.parameters())


def name_uncalled_models() -> None:
    """Assigns paths to models that were never called, and tags models that have new parameters."""
    modules = live_objects(Module)
    inside = {id(child) for module in modules for child in children(module)}
    for root in modules:
        try:
            if id(root) not in inside and _has_unknown(root):
                if not any(has_path(module) for module in root.modules()):
                    assign_paths(root)
                tag_model(root)
        except Exception as error:
            # A module whose `__init__` has not run has no tables to read and is not yet a model, so its error
            # does not count. Other modules may override these attributes, and raise any exception.
            if _is_initialized(root):
                count("search for uncalled models", error)


def name_parameters(parameters: list) -> None:
    """Names an optimizer's parameters after the modules that have them, whether these were called or not."""
    global _namings
    if any(owner_of(parameter) is None for parameter in parameters):
        _namings += 1
        if is_due(_namings):
            name_uncalled_models()


def add_groups() -> None:
    """Adds the parameters of optimizers that do not derive from torch's. They are found by the dicts in their
    `param_groups`."""
    global _additions
    _additions += 1
    if not is_due(_additions):
        return
    for group in live_objects(dict):
        parameters = dict.get(group, "params")
        if type(parameters) is list and all(isinstance(parameter, Tensor) for parameter in parameters):
            name_parameters(parameters)
            add_parameters(parameters)


def _note_without_optimizer(models: list, of_models, optimizers: list) -> None:
    """Records the parameters of `models` that no optimizer has, if all parameters of the optimizers are among
    `of_models`, the ids of the models' parameters. Otherwise, an optimizer may have copies of parameters,
    such as float32 copies of 16-bit parameters."""
    in_optimizers = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    if in_optimizers and in_optimizers <= of_models:
        for root in {id(model): model for model in models}.values():
            note_without_optimizer(path_of(root), root, in_optimizers)


def tag_everything_held() -> None:
    """Tags the tensors of live models and optimizers after an OOM, including those that were never called.
    Does so only for the first OOMs, because each search takes time."""
    global _oom_searches_left
    if not _oom_searches_left:
        return
    _oom_searches_left -= 1
    try:
        with without_torch_function():
            modules, optimizers, roots = [], [], {}
            for thing in live_objects(Module, Optimizer):
                (modules if issubclass(type(thing), Module) else optimizers).append(thing)
            inside = {id(child) for module in modules for child in children(module)}
            for root in modules:
                if id(root) not in inside and next(root.parameters(), None) is not None:
                    if not has_path(root):
                        assign_paths(root)
                    tag_model(root)
                    roots.update((id(parameter), root) for parameter in root.parameters())
                    note_bytes_on_cpu(path_of(root), list(root.parameters()))
            for optimizer in optimizers:
                parameters = parameters_of(optimizer)
                owners = (roots[id(parameter)] for parameter in parameters if id(parameter) in roots)
                for root in {id(owner): owner for owner in owners}.values():
                    note_optimizer(path_of(root), optimizer)
                add_parameters(parameters)
                tag_gradients_of(parameters)
                tag_state_of(optimizer)
            _note_without_optimizer(list(roots.values()), roots.keys(), optimizers)
            tag_engines()
    except Exception as error:
        # A module may be partly initialized, or override these attributes.
        count("tags when memory ran out", error)


def tag_registered(leaves: tuple) -> None:
    """Tags the objects that the program registers with `memtrace.track_external`."""
    try:
        with without_torch_function():
            seen: set[int] = set()
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    tag(leaf, PARAMETER if leaf.requires_grad else BUFFER, 0, 0, seen)
                elif isinstance(leaf, Module):
                    if not has_path(leaf):
                        assign_paths(outermost_module(leaf))
                    tag_model(leaf)
                elif isinstance(leaf, Optimizer):
                    tag_state_of(leaf)
    except Exception as error:
        # A module or an optimizer may override these attributes.
        count("track_external", error)
