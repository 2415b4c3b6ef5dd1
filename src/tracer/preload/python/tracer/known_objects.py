"""Creates objects of torch from which the library learns layouts.

The library reads fields of torch's own objects without calling torch. Their offsets differ between versions,
so the library finds the fields in objects whose contents it knows (see src/tracer/preload/python/op_io and
src/tracer/preload/attribution/autograd_seq.rs).
"""

from __future__ import annotations

from .failures import count
from .native import finish_op_layout, learn_tensor, with_observed_ops
from .torch_api import is_compiling, torch, without_modes

# The number of nodes to create, more than twice the number that
# src/tracer/preload/attribution/autograd_seq.rs needs.
NODES = 20


def use_known_tensors() -> None:
    """Runs ops on tensors that the library knows, so that it learns where an op keeps its inputs."""
    try:
        with_observed_ops(_run_ops)
    except Exception as error:
        # The program may override one of the ops, or this torch may lack it.
        count("ops on known tensors", error)
    finish_op_layout()


def _run_ops() -> None:
    with without_modes(), torch.no_grad():
        a, b = torch.zeros(7, device="cpu"), torch.zeros(11, device="cpu")
        for tensor in (a, b):
            storage = tensor.untyped_storage()
            learn_tensor(tensor._cdata, storage._cdata, storage.data_ptr(), storage.nbytes())
        b.resize_(7)
        a.add_(b)
        a.view(7)
        torch.add(a, b, out=torch.zeros(7, device="cpu"))
        torch.cat([a, b])


def make_graph_nodes() -> None:
    """Creates nodes of autograd's graph, so that the library learns where a record of an op
    keeps the sequence number."""
    try:
        if not is_compiling():
            with_observed_ops(_make_nodes)
    except Exception as error:
        # See `use_known_tensors`.
        count("nodes of autograd's graph", error)


def _make_nodes() -> None:
    with without_modes(), torch.enable_grad():
        node = torch.zeros(1, device="cpu", requires_grad=True)
        for _ in range(NODES):
            node = node.neg()
