"""Finds the storages of tensors, and records tags for their use."""

from __future__ import annotations

from .failures import count
from .native import HOST_TENSORS, record_tag
from .torch_api import (
    Parameter,
    Tensor,
    has_storage,
    sparse_by_columns,
    sparse_by_rows,
    sparse_coo,
    strided,
    without_torch_dispatch,
)


def is_traced(tensor) -> bool:
    """Returns True if the trace has the memory of a tensor: it is on a GPU, or CPU tensors are recorded."""
    return tensor.is_cuda or (HOST_TENSORS and tensor.is_cpu)


def dense_parts(tensor) -> list | tuple:
    """Returns the tensors with traced memory that make up a tensor: the tensor itself, no tensor if its
    memory is not traced, or several for a sparse tensor or a wrapper subclass such as DTensor."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter and hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        # From torch 2.15 on, DTensor lists its device mesh, too.
        tensors = [part for part in parts if part is not tensor and isinstance(part, Tensor)]
        return [dense for part in tensors for dense in dense_parts(part)]
    if not is_traced(tensor) or kind.__name__ == "FakeTensor":
        return ()
    if tensor.layout is strided:
        return (tensor,)
    return [dense for part in _sparse_parts(tensor) for dense in dense_parts(part)]


def _sparse_parts(tensor) -> tuple:
    """Returns the indices and values of a sparse tensor."""
    layout = tensor.layout
    with without_torch_dispatch():
        if layout is sparse_coo:
            return (tensor._indices(), tensor._values())
        if layout in sparse_by_rows:
            return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        if layout in sparse_by_columns:
            return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def values_of(gradient):
    """Returns the tensor of a gradient that a backward computed: its values if the gradient is sparse,
    because its indices may be the model's input."""
    if gradient.layout is not sparse_coo:
        return gradient
    with without_torch_dispatch():
        return gradient._values()


def pointers_of(tensor) -> list[int]:
    """Returns the start addresses of a tensor's storages in traced memory. The list is empty without any."""
    try:
        kind = type(tensor)
        if (kind is Tensor or kind is Parameter) and tensor.layout is strided:
            # This is the common case, such as for each gradient of each step.
            parts = (tensor,) if is_traced(tensor) else ()
        else:
            parts = dense_parts(tensor)
        # `untyped_storage` creates an object, so it is called only for views.
        found = [
            part.untyped_storage().data_ptr() if part.storage_offset() else part.data_ptr() for part in parts
        ]
        return [pointer for pointer in found if pointer]
    except Exception as error:
        # A tensor without memory is not a failure. A tensor subclass may raise any exception.
        if not _is_without_storage(tensor, error):
            count("tag of a tensor", error)
        return []


def tag(tensor, category: int, path_id: int, name_id: int, seen: set[int], weak: int = 0) -> None:
    """Records the use of a tensor's memory. `seen` has the storages that are tagged already, so the first of
    several tensors that share a storage names it. A weak tag does not replace a more specific use."""
    for pointer in pointers_of(tensor):
        if pointer not in seen:
            seen.add(pointer)
            record_tag(pointer, category, path_id, name_id, weak)


def _is_without_storage(tensor, error: Exception) -> bool:
    """Returns True if torch raised the error because the tensor has no memory to tag: it is functional,
    opaque, or a parameter that is not initialized yet."""
    if not isinstance(error, (RuntimeError, ValueError)) or hasattr(tensor, "__tensor_flatten__"):
        return False
    return not has_storage(tensor)
