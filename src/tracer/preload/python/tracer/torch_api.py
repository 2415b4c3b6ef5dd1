"""The parts of torch that the tracer uses.

This module is loaded only after `import torch` has finished, so that every name is found before the first
hook is installed. Submodules are taken from `sys.modules`, because an import statement could import a module
that the program has not imported, and because `torch.optim` deletes the attribute of its own submodule.
"""

from __future__ import annotations

import contextlib
import sys
import types

torch = sys.modules["torch"]
nn_module = sys.modules["torch.nn.modules.module"]
optim_optimizer = sys.modules["torch.optim.optimizer"]

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Module = nn_module.Module
Optimizer = optim_optimizer.Optimizer
# The type of a function that is written in Python. The library hooks no other callable object.
Function = types.FunctionType

empty_cache = torch._C._cuda_emptyCache if hasattr(torch._C, "_cuda_emptyCache") else lambda: None

# Modes that the program has entered must not see what the tracer reads.
without_torch_function = torch._C.DisableTorchFunction
without_torch_dispatch = torch._C._DisableTorchDispatch


@contextlib.contextmanager
def without_modes():
    """Runs ops as if the program had entered no mode of its own."""
    with without_torch_function(), without_torch_dispatch(), torch.inference_mode(False):
        yield


float32 = torch.float32
strided = torch.strided
sparse_coo = torch.sparse_coo
# The sparse layouts that are compressed along rows, and along columns.
sparse_by_rows = (torch.sparse_csr, torch.sparse_bsr)
sparse_by_columns = (torch.sparse_csc, torch.sparse_bsc)

# torch 2.0 has no `tree_leaves`.
tree_leaves = getattr(sys.modules.get("torch.utils._pytree"), "tree_leaves", None)
_eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
set_eval_frame = getattr(_eval_frame, "set_eval_frame", None)


def find_is_compiling():
    """Returns the function that says whether dynamo is tracing. Each hook calls it first, because a hook that
    does anything while dynamo traces breaks the graph."""
    found = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if found is None:
        found = torch._dynamo.is_compiling if hasattr(torch, "_dynamo") else lambda: False
    return found


is_compiling = find_is_compiling()


# Returns the state of `torch.jit.trace`, or None. While it traces, the size of a tensor is an op of the
# graph.
tracing_state = getattr(torch._C, "_get_tracing_state", lambda: None)


def has_storage(tensor) -> bool:
    """Returns False for tensors whose data cannot be accessed: functional tensors, sparse ones and other
    wrappers."""
    found = getattr(torch._C, "_has_storage", None)
    return found is None or found(tensor)
