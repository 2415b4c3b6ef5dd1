"""Reads autograd's graphs: the tensors at their roots, and the storages that their nodes have saved.

Saved tensors are not unpacked, so no hook of the program runs and nothing is recomputed (see
src/tracer/preload/python/saved_tensors.rs).
"""

from __future__ import annotations

import time

from .class_table import ClassTable
from .failures import count
from .native import learn_saved_tensor, saved_storages, with_observed_ops
from .torch_api import is_compiling, torch, without_modes

Base = torch._C.TensorBase if hasattr(torch._C, "TensorBase") else torch._C._TensorBase
grad_fn_of = Base.grad_fn.__get__
# The maximum number of nodes in one walk.
MAX_NODES = 400_000
STRIDE = 512

namespace_of_type = type.__dict__["__dict__"].__get__
bases_of = type.__dict__["__mro__"].__get__
# True once the layout of a saved tensor is known.
_is_learned = False


def learn() -> None:
    """Learns where a node keeps the storage of a saved tensor. The program's profilers do not see the ops and
    the memory that this takes."""
    try:
        if not is_compiling():
            with_observed_ops(_learn)
    except Exception as error:
        # The program may override one of the ops.
        count("saved tensors", error)


def are_saved_tensors_known() -> bool:
    """Returns whether `learn` has found where a node keeps the storage of a saved tensor."""
    return _is_learned


def _learn() -> None:
    global _is_learned
    with without_modes(), torch.enable_grad():
        known = torch.zeros(11, device="cpu", requires_grad=True)
        other = torch.zeros(11, device="cpu", requires_grad=True)
        node = (known * other).grad_fn
        storage = known.untyped_storage()
        addresses = (known._cdata, storage._cdata, storage.data_ptr())
        _is_learned = bool(learn_saved_tensor(node._raw_saved_self, *addresses))


def _find_raw_names(kind: type) -> tuple[str, ...]:
    names = {name for base in bases_of(kind) for name in namespace_of_type(base)}
    return tuple(name for name in names if name.startswith("_raw_saved_"))


# By class of nodes: the names of the attributes that have saved tensors.
_RAW_NAMES = ClassTable(_find_raw_names)


def saved_by(node) -> list[int]:
    """Returns the addresses of the storages that a node has saved."""
    saved: list = []
    for name in _RAW_NAMES[type(node)]:
        try:
            value = object.__getattribute__(node, name)
        except Exception:
            # A backward has freed the saved tensors.
            continue
        if type(value) in (tuple, list):
            saved += value
        elif value is not None:
            saved.append(value)
    return saved_storages(*saved) if saved else []


class Graphs:
    """The autograd graphs of a list of tensors."""

    def __init__(self, roots: list, deadline: float) -> None:
        """`roots` are pairs of the `id` of a tensor and its node. The walk ends at the deadline, in seconds
        of `time.monotonic`."""
        self.is_whole = True
        # By id(node): the node, so that its id stays valid; the ids of the next nodes; the node's storages.
        self._nodes: dict[int, tuple] = {}
        below: set[int] = set()
        pending = [node for _, node in roots]
        while pending:
            node = pending.pop()
            if id(node) in self._nodes:
                continue
            if len(self._nodes) % STRIDE == 0 and time.monotonic() > deadline:
                self.is_whole = False
                break
            if len(self._nodes) >= MAX_NODES:
                self.is_whole = False
                break
            nexts = [
                item[0] for item in object.__getattribute__(node, "next_functions") if item[0] is not None
            ]
            self._nodes[id(node)] = (node, [id(item) for item in nexts], saved_by(node))
            below.update(id(item) for item in nexts)
            pending += nexts
        # By id(root tensor): the number of nodes, and the addresses of the storages.
        self.by_root: dict[int, tuple[int, set[int]]] = {}
        # By id(node): the `id` of the root tensor that keeps the node alive.
        self.root_of: dict[int, int] = {}
        self._assign([(tensor, id(node)) for tensor, node in roots if id(node) not in below])

    def _assign(self, roots: list[tuple[int, int]]) -> None:
        """Assigns each node to the first root that reaches it."""
        for tensor, first in roots:
            if first in self.root_of:
                continue
            count, storages, pending = 0, set(), [first]
            while pending:
                number = pending.pop()
                known = self._nodes.get(number)
                if known is None or number in self.root_of:
                    continue
                self.root_of[number] = tensor
                count += 1
                storages.update(known[2])
                pending += known[1]
            self.by_root[tensor] = (count, storages)

    def ids(self) -> list[int]:
        """Returns the ids of this object's own containers, which refer to nodes."""
        return [id(self._nodes), *(id(entry) for entry in self._nodes.values())]
