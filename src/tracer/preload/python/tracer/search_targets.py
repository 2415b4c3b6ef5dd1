"""Gathers the objects whose holders a search looks for: tensors, the roots of autograd's graphs, copies of
models, and optimizers with parameters of a model that is gone."""

from __future__ import annotations

import time
import types
from collections.abc import Iterable, Iterator

from .frames import traceback_of
from .graphs import Graphs, grad_fn_of
from .holder_search import STRIDE
from .live_objects import live_objects
from .model_storages import IS_PLAIN, is_known, model_copies, owned_storages, pointer_of
from .native import block_bytes
from .reference_paths import dict_of
from .torch_api import Module, Optimizer, Tensor
from .unused_optimizers import UnusedParameters

# The maximum number of tensors in one search.
MOST_TENSORS = 4096
ERRORS = (BaseException, types.TracebackType)


class SearchTargets:
    """The targets of one search. Their attributes keep the gathered objects alive until the search ends, so
    that each `id` stays valid."""

    def __init__(self, deadline: float) -> None:
        """Gathers until the deadline, a `time.monotonic` value."""
        self._things = live_objects(Module, Optimizer, Tensor, *ERRORS)
        self.modules = self._of(Module)
        self.optimizers = self._of(Optimizer)
        self._errors = self._of(*ERRORS)
        self._tensors = {id(thing): thing for thing in self._of(Tensor)}
        # By id(frame): the exception or the traceback that keeps the frame of a traceback.
        self.frames = _frames_of_errors(self._errors)
        in_time = list(_until(deadline, self._tensors))
        nodes = ((number, _node_of(self._tensors[number])) for number in in_time)
        self._nodes = [(number, node) for number, node in nodes if node is not None]
        self.graphs = Graphs(self._nodes, deadline)
        # By the `id` of a tensor: the address of its own storage, and the storages that its graph has saved.
        self.direct: dict[int, int] = {}
        self.saved: dict[int, set[int]] = {}
        self.are_all_examined = self._find_storages(in_time, deadline)
        # The copies of models by `id`. The storages of these and, after `add_unused`, of optimizers.
        self._copies, self._storages_of_copies = model_copies(
            _until(deadline, self.modules), self.modules, self.optimizers
        )
        by_size = sorted({*self.direct, *self.saved}, key=lambda number: -self._bytes_of(number))
        chosen = _chosen(by_size)
        # Why not all tensors are searched; empty if they are.
        self.limit = (
            f"it examined {len(chosen)} of {len(by_size)} tensors" if len(chosen) < len(by_size) else ""
        )
        # By the `id` of an optimizer: the steps in which its unused parameters were allocated.
        self.births_of_unused: dict[int, set[int]] = {}
        # The ids of the targets, and the objects by `id`.
        self.ids = [*self._copies, *chosen]
        self.by_id = {**self._tensors, **self._copies}

    def _of(self, *kinds: type) -> list:
        return [thing for thing in self._things if issubclass(type(thing), kinds)]

    def _find_storages(self, numbers: list[int], deadline: float) -> bool:
        """Finds the storages of the tensors with these ids that are in live blocks and belong to no model or
        optimizer. Returns whether all live tensors were examined before the deadline."""
        owned = owned_storages(self.modules, self.optimizers)
        pointers = {number: pointer_of(self._tensors[number]) for number in _until(deadline, numbers)}
        self.direct = {n: p for n, p in pointers.items() if p and p not in owned and is_known(p)}
        for number, (_, storages) in self.graphs.by_root.items():
            live = {p for p in storages if p not in owned and is_known(p)}
            if live:
                self.saved[number] = live
        return len(pointers) == len(self._tensors)

    def _bytes_of(self, number: int) -> int:
        return sum(map(block_bytes, self.saved.get(number, ()))) + block_bytes(self.direct.get(number, 0))

    def add_unused(self, unused: list[UnusedParameters]) -> None:
        """Adds optimizers with unused parameters."""
        for each in unused:
            number = id(each.optimizer)
            self.ids.append(number)
            self.by_id[number] = each.optimizer
            self._storages_of_copies[number] = each.storages()
            self.births_of_unused[number] = each.births()

    def storages_of_model(self, number: int) -> Iterable[int]:
        """Returns the storages of a model or an optimizer among the targets, or nothing for other targets."""
        return self._storages_of_copies.get(number, ())

    def own_ids(self) -> list[int]:
        """Returns the ids of this object's own containers, which refer to targets."""
        own = [self._things, self.modules, self.optimizers, self._errors, self._tensors, self.frames]
        own += [self._nodes, *self._nodes, self._copies, self.by_id, dict_of(self)]
        return [id(container) for container in own] + self.graphs.ids()


def _until(deadline: float, things: Iterable) -> Iterator:
    """Yields the items of `things` until the deadline."""
    for number, thing in enumerate(things):
        if number % STRIDE == 0 and time.monotonic() > deadline:
            return
        yield thing


def _chosen(by_size: list[int]) -> list[int]:
    """Returns at most MOST_TENSORS of these tensors: the largest ones as one half, and tensors spread evenly
    over the rest as the other half, so that equal sizes from different steps are represented."""
    if len(by_size) <= MOST_TENSORS:
        return by_size
    half = MOST_TENSORS // 2
    count_of_rest = len(by_size) - half
    return by_size[:half] + [by_size[half + index * count_of_rest // half] for index in range(half)]


def _frames_of_errors(errors: list) -> dict[int, object]:
    """Returns the exception or the traceback that keeps each frame of a traceback, by id(frame)."""
    found: dict[int, object] = {}
    for thing in errors:
        is_error = issubclass(type(thing), BaseException)
        trace = traceback_of(thing) if is_error else thing
        while trace is not None:
            frame = id(trace.tb_frame)
            if is_error or frame not in found:
                found[frame] = thing
            trace = trace.tb_next
    return found


def _node_of(tensor):
    try:
        return grad_fn_of(tensor) if IS_PLAIN[type(tensor)] else None
    except Exception:
        # The tensor may be a view that was changed in place.
        return None
