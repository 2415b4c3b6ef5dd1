"""Records facts about called models that the sizes of their blocks do not show: the shape of the largest
input, that most of the parameters are not float32 or not trained, that the batch has one sample, that the
model is in evaluation mode, and, after an OOM, the class of its optimizer, the bytes of the parameters that
are still on the CPU, and the bytes of the trained parameters that no optimizer has.

The input gets a row when its shape changes. The other facts are exceptions, so many programs have no
such row. If a model is no longer such an exception, a further row says so (see src/trace/model_fact.rs).
"""

from __future__ import annotations

import itertools
import math
import os

from .native import record_model_fact
from .paths import path_of
from .storages import local_bytes, sizes_of
from .torch_api import Tensor

# By the path of a root and the name of a fact: the value in the latest row.
_recorded: dict[tuple[str, str], str] = {}
# By the path of a root: its latest input, and the elements of its largest.
_inputs: dict[str, tuple[str, int]] = {}
# The paths and inputs that were recorded.
_input_texts: set[tuple[str, str]] = set()
# By the path of a root: the path of the module in its latest row of parameters without an optimizer.
_without_optimizer: dict[str, str] = {}
# The maximum number of entries in `_recorded`. With as many in `_input_texts`, only larger inputs are added.
MOST = 1000
# The maximum number of items of one argument that are searched for tensors.
MOST_ITEMS = 100


def _record(path: str, fact: str, value: str, ordinary: str) -> None:
    known = _recorded.get((path, fact), ordinary)
    if path and value != known and ((path, fact) in _recorded or len(_recorded) < MOST):
        _recorded[path, fact] = value
        record_model_fact(f"{fact}={value} {path}")


def note_parameters(path: str, bytes_by_type: dict, trained: int) -> None:
    """Records the type of most of a root's parameters, and the bytes of those that are trained, if others are
    not. `bytes_by_type` has the bytes of its parameters on GPUs for each type."""
    if bytes_by_type:
        most = max(bytes_by_type, key=bytes_by_type.__getitem__)
        _record(path, "type", str(most).removeprefix("torch."), "float32")
        is_whole = trained == sum(bytes_by_type.values())
        _record(path, "trained", "all" if is_whole else str(trained), "all")


def note_bytes_on_cpu(path: str, parameters: list) -> None:
    """Records the bytes of a root's parameters that are still on the CPU, if others are on a GPU: the model
    is being moved there."""
    if any(parameter.is_cuda for parameter in parameters):
        on_cpu = sum(local_bytes(parameter) for parameter in parameters if parameter.is_cpu)
        _record(path, "on_cpu", str(on_cpu), "0")


def note_without_optimizer(path: str, root, in_optimizers: set[int]) -> None:
    """Records the bytes of a root's parameters on GPUs that require a gradient, but that no optimizer has.
    `in_optimizers` has the ids of the optimizers' parameters. The path is that of the innermost module with
    all these parameters."""
    without = [
        (name, parameter)
        for name, parameter in root.named_parameters()
        if parameter.requires_grad and parameter.is_cuda and id(parameter) not in in_optimizers
    ]
    if without and path:
        modules = [name.split(".")[:-1] for name, _ in without]
        common = root.get_submodule(".".join(os.path.commonprefix(modules)))
        inner = path_of(common) or path
        _record(inner, "no_optimizer", str(sum(local_bytes(parameter) for _, parameter in without)), "0")
        if _without_optimizer.get(path, inner) != inner:
            _record(_without_optimizer[path], "no_optimizer", "0", "0")
        _without_optimizer[path] = inner
    elif path in _without_optimizer:
        _record(_without_optimizer.pop(path), "no_optimizer", "0", "0")


def note_call(root, path: str, args: tuple, kwargs: dict) -> None:
    """Records the mode of a root that is called, and whether all inputs of the call have one sample: a first
    dimension of 1, and further ones."""
    _record(path, "mode", "train" if root.training else "eval", "train")
    values = (*args, *kwargs.values())
    given = [value for value in values if issubclass(type(value), Tensor) and value.is_cuda]
    # `size(0)`, because a nested tensor has no `shape`.
    samples = {value.size(0) for value in given if value.dim() > 1}
    if samples:
        _record(path, "batch", "one" if samples == {1} else "several", "several")


def note_input(path: str, args: tuple, kwargs: dict) -> None:
    """Records the type and the shape of the largest tensor among the arguments of a root's call. Lists,
    tuples and dicts are searched one level deep, up to MOST_ITEMS items."""
    given: list = []
    for value in (*args, *kwargs.values()):
        if type(value) in (list, tuple):
            given += value[:MOST_ITEMS]
        elif type(value) is dict:
            given += itertools.islice(value.values(), MOST_ITEMS)
        else:
            given.append(value)
    largest, shape, elements = None, (), 0
    for value in given:
        sizes = sizes_of(value) if issubclass(type(value), Tensor) else None
        if sizes is not None and math.prod(sizes) > elements:
            largest, shape, elements = value, sizes, math.prod(sizes)
    if largest is None or not path:
        return
    known, most = _inputs.get(path, ("", 0))
    text = f"{largest.dtype}[{'x'.join(map(str, shape))}]".removeprefix("torch.")
    # Texts stay in memory until the program ends. After many different ones, only clearly larger inputs
    # count.
    is_new = (path, text) not in _input_texts
    if text == known or is_new and len(_input_texts) >= MOST and elements <= most + most // 8:
        return
    _input_texts.add((path, text))
    _inputs[path] = (text, max(elements, most))
    record_model_fact(f"input={text} {path}")


def note_optimizer(path: str, optimizer) -> None:
    """Records the class of the optimizer of a root's parameters, and the options of its groups that add
    state, or decide on the temporary results of its step."""
    options = []
    for option in ("momentum", "centered", "amsgrad", "fused"):
        values = [group.get(option) for group in optimizer.param_groups]
        # A tensor has no truth value that may be read without a wait for the GPU.
        if any(value for value in values if isinstance(value, (int, float))):
            options.append(option)
    if any(group.get("foreach") is False for group in optimizer.param_groups):
        options.append("foreach=False")
    name = type(optimizer).__name__.replace(" ", "_")
    _record(path, "optimizer", ",".join([name, *options]), "")
