"""Tags the memory of parameters, buffers, gradients, optimizer state and inputs of the models that run.

A tag names a block after the block was allocated. Parameters and buffers are tagged when their root is
called, gradients after a backward or before an optimizer's step, optimizer state after a step.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from _thread import get_ident
from typing import NamedTuple

from .held import tag_attributes
from .model_facts import note_parameters
from .native import CATEGORIES, backward_count, hide, record_gradients
from .paths import path_of, root_id_of, table_by_module
from .shared import SharedTags
from .storages import form_of_tensor, local_bytes, tag, values_of
from .texts import id_of
from .torch_api import Optimizer, Parameter, Tensor, float32, strided

PARAMETER = CATEGORIES["parameter"]
BUFFER = CATEGORIES["buffer"]
GRADIENT = CATEGORIES["gradient"]
OPTIMIZER_STATE = CATEGORIES["optimizer_state"]
INPUT = CATEGORIES["input"]

# Read from `threading`, which torch imports, because the tracer may be started on another thread.
MAIN_THREAD = sys.modules["threading"].main_thread().ident
# The depth to which inputs are searched for tensors, in tuples, lists and dicts.
INPUT_DEPTH = 3
MOST_INPUTS = 4096
PLAIN_TENSORS = (Tensor, Parameter)


class Owner(NamedTuple):
    """The names of a parameter. `record_gradients` reads the first four by their position."""

    reference: weakref.ref
    path_id: int
    name_id: int
    form_id: int
    name: str
    # The `id` of the root to which the parameter belongs; 0 if no module of a called model has the parameter.
    root_id: int


# The names of parameters, by id(parameter). Another parameter may have the same id later (see `owner_of`).
_owners: dict[int, Owner] = {}
# The number of known parameters that were freed so far.
_gone = 0
# By id(root): the thread that called the root last, if it is not the main thread. Only that thread may read
# the gradients of the root.
_training_threads: dict[int, int] = table_by_module()
# The number of backward functions that had run when gradients were tagged last; -1 if one was running.
_tagged_backwards = -1

# The types of the parameters of called models, and the ids of the models' paths.
_model_types: set = set()
_model_paths: set[int] = set()
# By id(root): a reference to a parameter, and the address of its memory when the model was tagged last.
_known_places: dict[int, tuple[weakref.ref, int]] = table_by_module()
# By the name of a parameter and the key of its state: the id of the joined name, such as `weight.exp_avg`.
_state_name_ids: dict[tuple[str, str], int] = {}


def owner_of(parameter) -> Owner | None:
    """Returns the names of a parameter, or None if they are unknown."""
    owner = _owners.get(id(parameter))
    return owner if owner is not None and owner.reference() is parameter else None


def gone_parameters() -> int:
    """Returns the number of known parameters that were freed. If it changes, an id may
    belong to a new parameter."""
    return _gone


def _count_gone(_) -> None:
    global _gone
    _gone += 1


_parameter_is_gone = hide(_count_gone)


def _new_owner(parameter, path_id: int, name_id: int, name: str, root_id: int) -> Owner:
    # `record_gradients` handles plain tensors only.
    form_id = form_of_tensor(parameter, parameter) if type(parameter) in PLAIN_TENSORS else 0
    owner = Owner(weakref.ref(parameter, _parameter_is_gone), path_id, name_id, form_id, name, root_id)
    _owners[id(parameter)] = owner
    return owner


def add_parameters(parameters: list) -> None:
    """Adds the parameters of an optimizer that belong to no module. If no model has float32 parameters, a
    float32 parameter is the optimizer's own copy of weights, and so part of its state."""
    seen: set[int] = set()
    for parameter in parameters:
        if owner_of(parameter) is not None:
            continue
        if _model_types and float32 not in _model_types and parameter.dtype is float32:
            path_id = next(iter(_model_paths)) if len(_model_paths) == 1 else 0
            _new_owner(parameter, path_id, 0, "", 0)
            tag(parameter, OPTIMIZER_STATE, path_id, id_of("master"), seen, weak=1)
        else:
            _new_owner(parameter, 0, 0, "", 0)
            tag(parameter, PARAMETER, 0, 0, seen, weak=1)


def _gradient_of(parameter):
    # torch warns when the gradient of a non-leaf tensor is read.
    return parameter.grad if parameter.is_leaf else None


def tag_model(root) -> None:
    """Tags the parameters, gradients, buffers and plain attributes of the modules below a root, the root
    included. Leaves out modules without a path."""
    # The storages that have a tag. The first tag of a storage counts.
    seen: set[int] = set()
    _tag_parameters(root, seen)
    first = next(root.parameters(), None)
    if type(first) in PLAIN_TENSORS and first.is_cuda:
        _known_places[id(root)] = (weakref.ref(first), first.data_ptr())
    else:
        _known_places.pop(id(root), None)
    # A list of modules with their ids would have tuples, which go to Python's free list. The program's next
    # tuples would then not count for its garbage collector.
    for module in root.modules():
        path_id = id_of(path_of(module))
        for name, buffer in module._buffers.items() if path_id else ():
            if buffer is not None:
                tag(buffer, BUFFER, path_id, id_of(name), seen)
    # Attributes come last, because an attribute may be a view of a parameter.
    searched: set[int] = set()
    for module in root.modules():
        path_id = id_of(path_of(module))
        if path_id:
            tag_attributes(module, path_id, seen, searched)


def _tag_parameters(root, seen: set[int]) -> None:
    """Tags the parameters of a root's modules and their gradients. Records their types, and how many bytes
    are trained."""
    root_id = root_id_of(id(root))
    parameters, gradients = SharedTags(PARAMETER), SharedTags(GRADIENT, "bucket")
    inside = {id(module) for module in root.modules()}
    bytes_by_type: dict = {}
    trained = 0
    # A parameter that several modules share belongs to the first one.
    visited: set[int] = set()
    for module in root.modules():
        path_id = id_of(path_of(module))
        if not path_id:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in visited:
                continue
            visited.add(id(parameter))
            owner = owner_of(parameter)
            # A parameter that belongs to another root, too, keeps its name there.
            if owner is None or owner.root_id in inside or owner.root_id in (root_id, 0):
                owner = _new_owner(parameter, path_id, id_of(name), name, root_id)
            parameters.add(parameter, owner.path_id, owner.name_id)
            _model_types.add(parameter.dtype)
            if parameter.is_cuda:
                more = local_bytes(parameter)
                bytes_by_type[parameter.dtype] = bytes_by_type.get(parameter.dtype, 0) + more
                trained += more if parameter.requires_grad else 0
            gradient = _gradient_of(parameter)
            if gradient is not None:
                gradients.add(values_of(gradient), owner.path_id, owner.name_id)
    parameters.record(seen)
    gradients.record(seen)
    note_parameters(path_of(root), bytes_by_type, trained)
    if bytes_by_type:
        _model_paths.add(id_of(path_of(root)))


def has_moved(root) -> bool:
    """Returns True if a parameter of the model has other memory than when the model was tagged last."""
    reference, address = _known_places.get(id(root), (None, 0))
    parameter = reference() if reference is not None else None
    return parameter is not None and parameter.data_ptr() != address


def model_is_called(root_id: int) -> None:
    """Records that the calling thread runs the model. From now on, this thread tags the model's gradients."""
    here = get_ident()
    if here != MAIN_THREAD:
        _training_threads[root_id] = here
    else:
        _training_threads.pop(root_id, None)


def has_new_gradients() -> bool:
    """Returns True if a backward function has run since gradients were tagged last."""
    return _tagged_backwards == -1 or _tagged_backwards != backward_count()


def tag_gradients() -> None:
    """Tags the gradients of all known parameters, except for models that another thread trains, because a
    backward may be running there."""
    global _tagged_backwards
    here = get_ident()
    _tagged_backwards = backward_count()
    # The list is a copy, because another thread may add parameters meanwhile.
    owners = list(_owners.items())
    if _training_threads or here != MAIN_THREAD:
        thread_of = _training_threads.get
        owners = [item for item in owners if thread_of(item[1].root_id, MAIN_THREAD) == here]
    _tag_gradients_of_owners(owners)


def parameters_of(optimizer) -> list:
    """Returns the parameters in an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tag_gradients_of(parameters: list) -> None:
    """Tags the gradients of the parameters that an optimizer is about to step. On any thread, these
    gradients are complete."""
    keys = [id(parameter) for parameter in parameters]
    _tag_gradients_of_owners([(key, _owners[key]) for key in keys if key in _owners])


def _tag_gradients_of_owners(owners: list[tuple[int, Owner]]) -> None:
    """Tags the gradients of parameters, which are given by their entries in `_owners`."""
    gradients = SharedTags(GRADIENT, "bucket")
    for index in record_gradients(owners, Tensor, strided, GRADIENT):
        key, owner = owners[index]
        parameter = owner.reference()
        if parameter is None:
            _owners.pop(key, None)
            continue
        gradient = _gradient_of(parameter)
        if gradient is not None:
            gradients.add(values_of(gradient), owner.path_id, owner.name_id)
    gradients.record(set())


def state_holder(optimizer):
    """Returns the object that has the state of an optimizer: with `overlap_with_ddp`, a
    `ZeroRedundancyOptimizer` steps a functional optimizer, which is no `Optimizer`, in the backward."""
    inner = vars(optimizer).get("optim")
    is_functional = inner is not None and not isinstance(inner, Optimizer)
    return inner if is_functional and type(getattr(inner, "state", None)) is dict else optimizer


def tag_state_of(optimizer) -> None:
    """Tags the state that an optimizer keeps for its parameters."""
    seen: set[int] = set()
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(values, dict):
            continue
        owner = owner_of(parameter)
        path_id, name = (owner.path_id, owner.name) if owner is not None else (0, "")
        for key, value in values.items():
            if isinstance(value, Tensor):
                state = (name, key)
                if state not in _state_name_ids:
                    _state_name_ids[state] = id_of(f"{name}.{key}" if name else str(key))
                tag(value, OPTIMIZER_STATE, path_id, _state_name_ids[state], seen)


def tag_inputs(value, seen: set[int], depth: int = INPUT_DEPTH) -> None:
    """Tags the tensors in the arguments of a call. Searches up to MOST_INPUTS items of each list and dict."""
    # Not `isinstance`: it reads `__class__`, which runs the program's code if the value is a proxy.
    kind = type(value)
    if issubclass(kind, Tensor):
        tag(value, INPUT, 0, 0, seen)
    elif depth and issubclass(kind, (tuple, list, dict)):
        items = dict.values(value) if issubclass(kind, dict) else value
        for item in itertools.islice(items, MOST_INPUTS):
            tag_inputs(item, seen, depth - 1)
