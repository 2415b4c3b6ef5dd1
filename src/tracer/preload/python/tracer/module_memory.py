"""Records the memory of each module and of each of its calls, for `MEMTRACE_OPS=io`.

Bytes are counted as in `torch.distributed._tools.mem_tracker.MemTracker`, which adds the size of a tensor's
storage once for every occurrence of the tensor.
"""

from __future__ import annotations

from .native import APIS, MEMORY_UNIT, record_module_memory
from .paths import table_by_module
from .storages import dense_parts
from .torch_api import Tensor, tree_leaves, without_torch_function

PARAMETERS = APIS["module_parameters"]
BUFFERS = APIS["module_buffers"]
INPUTS = APIS["module_inputs"]
OUTPUTS = APIS["module_outputs"]

# By id(module): the memory of its parameters and buffers when it was recorded last.
_recorded: dict[int, tuple] = table_by_module()


def _bytes_by_device(tensors) -> dict[int, tuple[int, int]]:
    """Returns the bytes of the tensors on each device, exact and rounded up to the allocator's sizes."""
    sums: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        for part in dense_parts(tensor):
            size = part.untyped_storage().nbytes()
            total, rounded = sums.get(part.device.index, (0, 0))
            sums[part.device.index] = (total + size, rounded + -(-size // MEMORY_UNIT) * MEMORY_UNIT)
    return sums


def _record(api: int, sums: dict[int, tuple[int, int]]) -> None:
    for device, (size, rounded) in sums.items():
        record_module_memory(api, device, size, rounded)


def _tensors_in(value):
    if issubclass(type(value), Tensor):
        return (value,)
    if tree_leaves is None:
        return ()
    return [leaf for leaf in tree_leaves(value) if issubclass(type(leaf), Tensor)]


def measure_call(module, args: tuple) -> None:
    """Records the inputs of a call that begins, and the module's own memory if it has changed."""
    with without_torch_function():
        own = (_bytes_by_device(module.parameters()), _bytes_by_device(module.buffers()))
        if _recorded.get(id(module)) != own:
            _recorded[id(module)] = own
            _record(PARAMETERS, own[0])
            _record(BUFFERS, own[1])
        _record(INPUTS, _bytes_by_device(_tensors_in(args)))


def measure_result(output) -> None:
    """Records the outputs of a call that ends."""
    with without_torch_function():
        _record(OUTPUTS, _bytes_by_device(_tensors_in(output)))
