"""Searches for the names that hold given objects, along the objects that refer to them.

The search goes upwards, from the targets to the objects that refer to them, level by level. It ends where an
object has a name in the program: a variable, or an attribute of a module, a class or a function.
"""

from __future__ import annotations

import gc
import time

from .native import find_referrers
from .reference_paths import UNNAMED, HolderName, Names, Root, dict_of, is_own, name_of_type
from .torch_api import Module

# The maximum number of references between a target and the name that holds it.
LEVELS = 10
# The number of objects between two checks of the clock.
STRIDE = 1024


def referrers_of(targets: list[int], excluded: list[int], deadline: float):
    """Returns the objects that refer to a target, each followed by the `id` of the target, in a flat list.
    Leaves out the objects whose `id` is in `excluded`. Returns None if this takes longer than until the
    deadline, a `time.monotonic` value."""
    if not targets:
        return []
    left = int((deadline - time.monotonic()) * 1000)
    return find_referrers(gc.get_objects, targets, excluded, max(left, 0))


class HolderSearch:
    """The objects and the names that lead to the targets of one search."""

    def __init__(self, names: Names, root_of_node: dict[int, int], frames: dict, deadline: float) -> None:
        """`root_of_node` has the root tensor of each node of autograd's graphs, and `frames` has the
        exception or the traceback that keeps each frame of a traceback. Both go by `id`. The search ends at
        the deadline, a `time.monotonic` value."""
        self._names, self._root_of_node, self._frames = names, root_of_node, frames
        self._deadline = deadline
        self.is_whole = True
        # `_objects` has the objects that refer to a target, directly or through others, by `id`. `_ends` has
        # the objects to which a name of the program refers, by `id`, each with that name.
        self._objects: dict[int, object] = {}
        self._ends: dict[int, tuple[Root, object]] = {}
        # By the `id` of an object: the ids of the objects that it refers to.
        self._below: dict[int, list[int]] = {}
        # By the `id` of an object: the id of the next object on the shortest chain from a name to it.
        self._above: dict[int, int] = {}
        # By the `id` of an object: the id of an object that refers to it, even if no name leads there.
        self._unnamed_above: dict[int, int] = {}
        # The ids of the objects that a name leads to.
        self.reached: set[int] = set()

    def run(self, targets: set[int], excluded: list[int]) -> None:
        """Searches for the names that hold the objects with the ids `targets`. `excluded` has the ids of the
        tracer's own objects that refer to them."""
        excluded = [*excluded, id(self._objects), id(self._ends), id(self._frames)]
        excluded += [
            id(namespace) for namespace in map(dict_of, (self, self._names)) if namespace is not None
        ]
        level, seen = set(targets), set(targets)
        for _ in range(LEVELS):
            above: set[int] = set()
            wanted = [child for child in level if not self._follow_known(child, seen, above)]
            self._follow_referrers(wanted, excluded, seen, above)
            level = above
            if not level or not self.is_whole:
                break
        self._connect()

    def _follow_known(self, child: int, seen: set[int], above: set[int]) -> bool:
        """Follows an object whose holder is known without a search for referrers: a variable's value, a node
        of a graph, or a frame of a traceback. Returns False for other objects."""
        variable = self._names.variable(child)
        if variable is not None:
            self._ends[child] = (variable, None)
        elif child in self._root_of_node:
            self._add(self._root_of_node[child], child, seen, above)
        elif child in self._frames:
            holder = self._frames[child]
            self._objects[id(holder)] = holder
            self._add(id(holder), child, seen, above)
        else:
            return False
        return True

    def _follow_referrers(
        self, wanted: list[int], excluded: list[int], seen: set[int], above: set[int]
    ) -> None:
        """Adds the objects that refer to `wanted`, or the names that they give."""
        found = referrers_of(wanted, excluded, self._deadline)
        if found is None:
            self.is_whole = False
            return
        pairs = iter(found)
        for number, (parent, child) in enumerate(zip(pairs, pairs)):
            if number % STRIDE == 0 and time.monotonic() > self._deadline:
                self.is_whole = False
                return
            if child in self._ends or is_own(parent) or id(parent) == id(found):
                continue
            end = self._names.root(parent, child)
            if end is not None:
                keep = parent if issubclass(type(parent), (Module, type)) else None
                self._ends[child] = (end, keep)
                continue
            self._objects[id(parent)] = parent
            self._add(id(parent), child, seen, above)

    def _add(self, parent: int, child: int, seen: set[int], above: set[int]) -> None:
        self._below.setdefault(parent, []).append(child)
        if parent not in seen:
            seen.add(parent)
            above.add(parent)

    def _connect(self) -> None:
        """Finds the shortest chain from a name to each object."""
        queue = list(self._ends)
        self.reached.update(queue)
        for parent in queue:
            for child in self._below.get(parent, ()):
                if child not in self.reached:
                    self.reached.add(child)
                    self._above[child] = parent
                    queue.append(child)
        self._unnamed_above = {
            child: parent for parent, children in self._below.items() for child in children
        }

    def describe(self, target: int, by_id: dict) -> tuple[HolderName, int | None] | None:
        """Returns the holder of the target with this `id`, and the `id` of the root tensor of the graph that
        keeps it (None without a graph). Returns None if no Python object refers to the target. `by_id` has
        all targets."""
        chain = [target]
        while chain[-1] in self._above:
            chain.append(self._above[chain[-1]])
        chain.reverse()
        end = self._ends.get(chain[0])
        if end is None:
            unnamed = self._describe_unnamed(target)
            return (unnamed, None) if unnamed is not None else None
        root, keep = end
        # An attribute of a graph's node, such as `ctx.states`, belongs to the graph, so the chain is cut at
        # the node.
        graph = None
        at = next((at for at, number in enumerate(chain) if number in self._root_of_node), None)
        if at is not None:
            graph = self._root_of_node[chain[at]]
            chain = chain[: max(at, 1)]
        objects = [
            self._objects[number] if number in self._objects else by_id.get(number) for number in chain
        ]
        return self._names.describe(root, objects if keep is None else [keep, *objects]), graph

    def _describe_unnamed(self, target: int) -> HolderName | None:
        """Returns the outermost object that was found above a target to which no name leads, or None if no
        object refers to the target."""
        top = target
        for _ in range(LEVELS):
            top = self._unnamed_above.get(top, top)
        if top == target or top not in self._objects:
            return None
        kind = type(self._objects[top])
        return self._names.describe(Root(UNNAMED, "", f"{name_of_type(kind)} object", "", 0), [])
