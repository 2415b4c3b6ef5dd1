"""Finds the storages of tensors, and records tags for their use."""

from __future__ import annotations

from .failures import count
from .native import HOST_TENSORS, record_tag, text_id
from .torch_api import (
    Parameter,
    Tensor,
    has_storage,
    sparse_by_columns,
    sparse_by_rows,
    sparse_coo,
    strided,
    tracing_state,
    without_torch_dispatch,
)

# By type and shape: the ids of the texts with both.
_forms: dict[tuple, int] = {}
# The maximum number of entries in `_forms`. Inputs may have another shape in each step.
MOST_FORMS = 4000


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


def sizes_of(tensor) -> tuple | None:
    """Returns the sizes of a tensor, or None if they are unknown: a lazy parameter and a nested tensor have
    no sizes, a fake tensor has no memory, and reading symbolic sizes adds guards to a graph."""
    try:
        if type(tensor).__name__ == "FakeTensor" or tensor.is_meta:
            return None
        sizes = tuple(tensor.shape)
        return sizes if all(type(size) is int for size in sizes) else None
    except Exception:
        # A subclass may raise any exception.
        return None


def local_bytes(parameter) -> int:
    """Returns the bytes of a parameter. For a DTensor, only the part on this rank counts."""
    part = getattr(parameter, "_local_tensor", parameter)
    return part.numel() * part.element_size()


def form_of_tensor(tensor, part) -> int:
    """Returns the form of a part of a tensor, or 0 if it is unknown. A plain tensor is its own part. If the
    part is packed, the type that it is decoded to is in brackets, such as `int8(bfloat16)`."""
    if tracing_state():
        return 0
    try:
        dtype, sizes = part.dtype, sizes_of(part)
        if part is not tensor and tensor.layout is strided and dtype.itemsize < tensor.dtype.itemsize:
            dtype = f"{dtype}({tensor.dtype})"
        elif type(tensor).__name__ == "Params4bit" and tensor.quant_state is not None:
            dtype = f"{tensor.quant_state.quant_type}({tensor.quant_state.dtype})"
            sizes = tuple(tensor.quant_state.shape)
    except Exception:
        return 0
    key = (dtype, sizes)
    found = _forms.get(key)
    if found is None:
        if len(_forms) >= MOST_FORMS:
            return 0
        shape = "?" if sizes is None else f"[{'x'.join(map(str, sizes))}]"
        found = _forms[key] = text_id(f"{dtype} {shape}".replace("torch.", ""))
    return found


def storages_of(tensor) -> list[tuple[int, int]]:
    """Returns the start address and the id of the form for each storage of a tensor in traced memory."""
    try:
        kind = type(tensor)
        if (kind is Tensor or kind is Parameter) and tensor.layout is strided:
            # This is the common case, such as for each gradient of each step.
            parts = (tensor,) if is_traced(tensor) else ()
        else:
            parts = dense_parts(tensor)
        # `untyped_storage` creates an object, so it is called only for views.
        found = [
            (
                part.untyped_storage().data_ptr() if part.storage_offset() else part.data_ptr(),
                form_of_tensor(tensor, part),
            )
            for part in parts
        ]
        return [storage for storage in found if storage[0]]
    except Exception as error:
        # A tensor without memory is not a failure. A tensor subclass may raise any exception.
        if not _is_without_storage(tensor, error):
            count("tag of a tensor", error)
        return []


def tag(tensor, category: int, path_id: int, name_id: int, seen: set[int], weak: int = 0) -> None:
    """Records the use of a tensor's memory. `seen` has the storages that are tagged already, so the first of
    several tensors that share a storage names it. A weak tag does not replace a more specific use."""
    for pointer, form_id in storages_of(tensor):
        if pointer not in seen:
            seen.add(pointer)
            record_tag(pointer, category, path_id, name_id, form_id, weak)


def _is_without_storage(tensor, error: Exception) -> bool:
    """Returns True if torch raised the error because the tensor has no memory to tag: it is functional,
    opaque, or a parameter that is not initialized yet."""
    if not isinstance(error, (RuntimeError, ValueError)) or hasattr(tensor, "__tensor_flatten__"):
        return False
    return not has_storage(tensor)
