"""Groups the targets of a search by their holder, and sums what each holder keeps."""

from __future__ import annotations

import time

from .holder_search import HolderSearch
from .native import block_bytes, block_step
from .reference_paths import UNNAMED, UNUSED, HolderName, name_of_type
from .search_targets import SearchTargets

# The number of targets that are named between two checks of the clock.
STRIDE = 16


class HolderGroup:
    """What one holder keeps."""

    __slots__ = ("births", "bytes", "name", "nodes", "roots", "tensors")

    def __init__(self, name: HolderName) -> None:
        self.name = name
        self.bytes = self.tensors = self.nodes = 0
        # The ids of the root tensors of its graphs.
        self.roots: set[int] = set()
        # The steps in which its blocks were allocated.
        self.births: set[int] = set()


def group_by_holder(
    targets: SearchTargets, search: HolderSearch, has_ended: bool, deadline: float
) -> tuple[list[HolderGroup], bool]:
    """Returns what each holder keeps, and whether all targets were named before the deadline, a
    `time.monotonic` value. `has_ended` says that the program has ended."""
    # The storages of tensors that a name leads to. Other tensors may be alive only because torch keeps the
    # Python objects of the tensors that a node has saved.
    named = {pointer for number, pointer in targets.direct.items() if number in search.reached}
    groups: dict[str, HolderGroup] = {}
    counted: set[int] = set()
    described = 0
    # Variables and containers come before graphs, because each storage is reported for its first holder only.
    for number in sorted(targets.ids, key=lambda number: number in targets.saved):
        if described % STRIDE == 0 and time.monotonic() > deadline:
            break
        described += 1
        found = search.describe(number, targets.by_id)
        if found is None:
            continue
        name, graph = found
        if number in targets.births_of_unused:
            if has_ended and name.kind == UNNAMED:
                # The garbage collector has not freed the optimizer yet.
                continue
            text = f"{name_of_type(type(targets.by_id[number]))} in {name.text}"
            name = name._replace(group=f"{number} {text}", text=text, kind=UNUSED)
        group = groups.setdefault(name.group, HolderGroup(name))
        # The graph whose node keeps the tensor, and the tensor's own graph if it has saved storages.
        group.roots.update(root for root in (graph, number if number in targets.saved else None) if root)
        _add(group, number, targets, named, counted)
    for group in groups.values():
        group.nodes = sum(targets.graphs.by_root[root][0] for root in group.roots)
    return list(groups.values()), described == len(targets.ids)


def _add(group: HolderGroup, number: int, targets: SearchTargets, named: set[int], counted: set[int]) -> None:
    """Adds the memory of a target to its group. `counted` has the storages of all groups so far."""
    direct = targets.direct.get(number, 0)
    of_model = targets.storages_of_model(number)
    group.tensors += len(of_model) if of_model else number in targets.direct
    for pointer in {*of_model, *targets.saved.get(number, ()), direct} - counted - {0}:
        if pointer in named and pointer != direct and not of_model:
            continue
        counted.add(pointer)
        group.bytes += block_bytes(pointer)
        if number not in targets.births_of_unused:
            group.births.add(block_step(pointer))
    group.births.update(targets.births_of_unused.get(number, ()))
