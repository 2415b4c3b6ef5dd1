"""Searches for the holders of GPU memory that a step has left behind, for `memtrace leaks --holders`.

The search begins at the live tensors that are not parameters, buffers, gradients or optimizer state, at
the autograd graphs, at copies of models, and at optimizers with parameters of models that are gone. From
each of them, it follows the objects that refer to it, until it reaches an object for which the program has a
name. The answer goes into the trace, one row per holder, and to the caller.

At its end, the search drops every reference, so it keeps no object alive afterwards. Other Python threads
continue during the search; objects that they release live until it ends. The search runs no code of the
program, and its time is limited (MEMTRACE_RETAINED). While the program runs, searches that it did not ask for
take at most 1% of its time so far.
"""

from __future__ import annotations

import gc
import json
import time
import types

from .failures import count
from .frames import Lines, left_frames, running_variables, traceback_of
from .frames import learn as learn_frames
from .graphs import Graphs, grad_fn_of, known_layouts
from .live_objects import live_objects, why_not_searchable
from .main_code import main_code
from .model_storages import is_known, is_plain, model_copies, owned_storages, pointer_of, unused_parameters
from .native import (
    RETAINED_IS_BOUNDED,
    RETAINED_MS,
    block_bytes,
    block_step,
    current_step,
    find_referrers,
    is_growing,
    record_retained,
)
from .reference_paths import Names, Root, dict_of, is_own, name_of_type
from .torch_api import Module, Optimizer, Tensor, without_torch_dispatch, without_torch_function

# The maximum number of references between a tensor and the name that holds it.
LEVELS = 10
# The maximum number of tensors in one search, and the maximum number of holders in its answer.
TARGETS = 4096
HOLDERS = 12
# Holders of fewer bytes are not reported.
MIN_BYTES = 64 << 10
# The age, in steps, from which a tensor counts as old. A loop variable keeps the previous step's tensor until
# it is assigned again, so an age of 1 is normal.
AGE = 2
MAX_TEXT = 700
# An optimizer that gets new parameters grows if they are from at least FEWEST_STEPS old steps.
FEWEST_STEPS = 3
# Tensors kept since one of the first FIRST_STEPS steps count as kept from the beginning.
FIRST_STEPS = 5
# The share of a search's time after which it stops following references, and only names
# the holders found so far.
SEARCHING = 0.75
# The number of objects between two checks of the clock.
STRIDE = 1024
# The number of targets that are named between two checks of the clock.
LOOK = 16
# Searches that start because memory grows take at most this share of the run's time so far.
GROWTH_SHARE = 0.01
# A search that may take less time, in seconds, is left out: it would find little.
LEAST_SECONDS = 0.1

GROWS, TRACEBACK, UNUSED, WINDOW, OLD, RECENT = "grows", "traceback", "unused", "window", "old", "recent"
RETAINED = (GROWS, TRACEBACK, UNUSED)

# "growth" has the seconds that searches because memory grows took.
_state = {"is_busy": False, "walks": 0, "growth": 0.0, "begin": time.monotonic()}
# Whether the layout of frames is known.
_known = {"frames": False}


def _frames_of_errors(things: list) -> dict[int, object]:
    """Returns the exception or the traceback that keeps each frame of a traceback, by id(frame)."""
    found: dict[int, object] = {}
    for thing in things:
        is_error = issubclass(type(thing), BaseException)
        trace = traceback_of(thing) if is_error else thing
        while trace is not None:
            frame = id(trace.tb_frame)
            if is_error or frame not in found:
                found[frame] = thing
            trace = trace.tb_next
    return found


class Search:
    """A search for the names that hold given objects."""

    def __init__(self, names: Names, root_of_node: dict[int, int], frames: dict, deadline: float) -> None:
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
        """Searches for the holders of the objects with these ids. `excluded` has the ids of
        the search's own objects."""
        excluded = [*excluded, id(self._objects), id(self._ends), id(self._frames)]
        excluded += [
            id(namespace) for namespace in map(dict_of, (self, self._names)) if namespace is not None
        ]
        frontier, seen = set(targets), set(targets)
        for _ in range(LEVELS):
            wanted = []
            following: set[int] = set()
            for child in frontier:
                variable = self._names.variable(child)
                if variable is not None:
                    self._ends[child] = (variable, None)
                elif child in self._root_of_node:
                    self._add(self._root_of_node[child], child, seen, following)
                elif child in self._frames:
                    holder = self._frames[child]
                    self._objects[id(holder)] = holder
                    self._add(id(holder), child, seen, following)
                else:
                    wanted.append(child)
            left = int((self._deadline - time.monotonic()) * 1000)
            found = find_referrers(gc.get_objects, wanted, excluded, max(left, 0)) if wanted else []
            if found is None:
                self.is_whole = False
                break
            pairs = iter(found)
            for number, (parent, child) in enumerate(zip(pairs, pairs, strict=True)):
                if number % STRIDE == 0 and time.monotonic() > self._deadline:
                    self.is_whole = False
                    break
                if child in self._ends or is_own(parent) or id(parent) == id(found):
                    continue
                end = self._names.root(parent, child)
                if end is not None:
                    keep = parent if issubclass(type(parent), (Module, type)) else None
                    self._ends[child] = (end, keep)
                    continue
                self._objects[id(parent)] = parent
                self._add(id(parent), child, seen, following)
            del found, pairs
            frontier = following
            if not frontier or not self.is_whole:
                break
        self._connect()

    def _add(self, parent: int, child: int, seen: set[int], following: set[int]) -> None:
        self._below.setdefault(parent, []).append(child)
        if parent not in seen:
            seen.add(parent)
            following.add(parent)

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

    def describe(self, target: int, tensors: dict) -> tuple[dict, int | None] | None:
        """Returns the holder of a tensor, which is `tensors[target]`, and the `id` of the root tensor of the
        graph that keeps it (None without a graph). Returns None if no Python object refers to the tensor."""
        chain = [target]
        while chain[-1] in self._above:
            chain.append(self._above[chain[-1]])
        chain.reverse()
        end = self._ends.get(chain[0])
        if end is None:
            # No name leads to the target, so the outermost object that was found is reported as the holder.
            top = target
            for _ in range(LEVELS):
                top = self._unnamed_above.get(top, top)
            if top == target or top not in self._objects:
                return None
            kind = type(self._objects[top])
            root = Root("unnamed", "", f"{name_of_type(kind)} object", "", 0)
            return self._names.describe(root, []), None
        root, keep = end
        # An attribute of a graph's node, such as `ctx.states`, belongs to the graph, so the chain is cut at
        # the node.
        graph = None
        at = next((at for at, number in enumerate(chain) if number in self._root_of_node), None)
        if at is not None:
            graph = self._root_of_node[chain[at]]
            chain = chain[: max(at, 1)]
        objects = [
            self._objects[number] if number in self._objects else tensors.get(number) for number in chain
        ]
        return self._names.describe(root, objects if keep is None else [keep, *objects]), graph


def walk(why: str, seconds: float = RETAINED_MS / 1000) -> list[dict]:
    """Searches for at most some seconds, and records the holders in the trace. Returns them in the order of
    `_judged`. `why` is the reason for the search: `call`, `oom`, `growth`, `command` or `exit`."""
    if _state["is_busy"]:
        return []
    try:
        _state["is_busy"] = True
        begin = time.monotonic()
        _state["walks"] += 1
        # The time from here to the last row belongs to no phase.
        record_retained(json.dumps({"walk": _state["walks"], "begins": why}))
        with without_torch_function(), without_torch_dispatch():
            holders, is_whole, reason = _holders(why, begin, seconds)
        _record(why, holders, is_whole, reason, begin)
        return holders
    except Exception as error:
        count("search for what is retained", error)
        return []
    finally:
        _state["is_busy"] = False


def _each(things, deadline: float):
    """Yields the items of `things` until `deadline`, a `time.monotonic` value."""
    for number, thing in enumerate(things):
        if number % STRIDE == 0 and time.monotonic() > deadline:
            return
        yield thing


def _unknown() -> str:
    """Returns a text that says what cannot be read in this program, or an empty text if
    everything can be read."""
    _known["frames"] = _known["frames"] or learn_frames()
    if not known_layouts:
        return "the tensors that autograd's graphs saved cannot be read with this version of torch"
    return "" if _known["frames"] else "the variables of running functions cannot be read with this Python"


def _chosen(by_size: list[int]) -> list[int]:
    """Returns at most TARGETS of these tensors: the largest ones as one half, and tensors spread evenly over
    the rest as the other half, so that equal sizes from different steps are represented."""
    if len(by_size) <= TARGETS:
        return by_size
    half = TARGETS // 2
    count_of_rest = len(by_size) - half
    return by_size[:half] + [by_size[half + index * count_of_rest // half] for index in range(half)]


class Gathered:
    """The objects at which a search begins: tensors, roots of autograd graphs, and copies of models."""

    def __init__(self, deadline: float) -> None:
        """Gathers until the deadline, in seconds of `time.monotonic`."""
        # The attributes keep everything alive until the end of the search, so that each id stays valid.
        self.things = live_objects(Module, Optimizer, Tensor, BaseException, types.TracebackType)
        self.modules = [thing for thing in self.things if issubclass(type(thing), Module)]
        self.optimizers = [thing for thing in self.things if issubclass(type(thing), Optimizer)]
        errors = (BaseException, types.TracebackType)
        self.errors = [thing for thing in self.things if issubclass(type(thing), errors)]
        self.tensors = {id(thing): thing for thing in self.things if issubclass(type(thing), Tensor)}
        owned = owned_storages(self.modules, self.optimizers)
        self.frames = _frames_of_errors(self.errors)
        looked_at = list(_each(self.tensors, deadline))
        nodes = ((number, _node_of(self.tensors[number])) for number in looked_at)
        self.nodes = [(number, node) for number, node in nodes if node is not None]
        self.graphs = Graphs(self.nodes, deadline)
        pointers = {number: pointer_of(self.tensors[number]) for number in _each(looked_at, deadline)}
        # By the `id` of a tensor: the address of its own storage, and the storages that its graph has saved.
        self.direct = {n: p for n, p in pointers.items() if p and p not in owned and is_known(p)}
        self.saved: dict[int, set[int]] = {}
        for number, (_, storages) in self.graphs.by_root.items():
            live = {p for p in storages if p not in owned and is_known(p)}
            if live:
                self.saved[number] = live
        by_size = sorted({*self.direct, *self.saved}, key=lambda number: -self._bytes_of(number))
        self.copies, self.storages_of_copies = model_copies(
            _each(self.modules, deadline), self.modules, self.optimizers
        )
        chosen = _chosen(by_size)
        # The ids of the objects whose holders are searched, and the objects by `id`.
        self.targets = [*self.copies, *chosen]
        self.by_id = {**self.tensors, **self.copies}
        self.is_whole = len(pointers) == len(self.tensors)
        self.reason = (
            f"it examined {len(chosen)} of {len(by_size)} tensors" if len(chosen) < len(by_size) else ""
        )

    def _bytes_of(self, number: int) -> int:
        return sum(map(block_bytes, self.saved.get(number, ()))) + block_bytes(self.direct.get(number, 0))

    def own_ids(self) -> list[int]:
        """Returns the ids of this object's own containers, which refer to targets."""
        own = [self.things, self.modules, self.optimizers, self.errors, self.tensors, self.frames]
        own += [self.nodes, *self.nodes, self.copies, self.by_id, dict_of(self)]
        return [id(container) for container in own]


def _search(
    gathered: Gathered, why: str, deadline: float, end: float
) -> tuple[Search, dict[int, set[int]], bool]:
    """Searches for the names that hold the gathered objects. Adds the optimizers with parameters of no module
    to the targets. Returns the search, the steps in which the parameters of each such optimizer were made (by
    the `id` of the optimizer), and whether all of them were found."""
    # The variables of the failed request are named like running variables, because they are not memory that a
    # failed attempt has left behind.
    left = left_frames() if why == "oom" else []
    names = Names(*running_variables(left), main_code(), Lines(end))
    search = Search(names, gathered.graphs.root_of, gathered.frames, deadline)
    own = [*gathered.own_ids(), id(left)]
    unused, are_known = _only_in_optimizers(gathered.modules, gathered.optimizers, names, own, deadline)
    for each in unused:
        number = id(each.optimizer)
        gathered.targets.append(number)
        gathered.by_id[number] = each.optimizer
        gathered.storages_of_copies[number] = each.storages()
    births_of_unused = {id(each.optimizer): each.births() for each in unused}
    search.run(set(gathered.targets), [*own, id(unused), *gathered.graphs.ids()])
    return search, births_of_unused, are_known


def _grouped(
    gathered: Gathered, search: Search, births_of_unused: dict[int, set[int]], why: str, end: float
) -> tuple[list[dict], bool]:
    """Returns the holders with the storages of their tensors, and whether time sufficed for all targets."""
    direct, saved = gathered.direct, gathered.saved
    # The storages of tensors that a name leads to. Other tensors may be alive only because torch keeps the
    # Python objects of the tensors that a node has saved.
    named = {pointer for n, pointer in direct.items() if n in search.reached}
    groups: dict[str, dict] = {}
    placed: set[int] = set()
    # Variables and containers come before graphs, because each storage is reported for its first holder only.
    described = 0
    for number in sorted(gathered.targets, key=lambda number: number in saved):
        if described % LOOK == 0 and time.monotonic() > end:
            break
        described += 1
        described_as = search.describe(number, gathered.by_id)
        if described_as is None:
            continue
        found, graph = described_as
        if number in births_of_unused and why == "exit" and found["kind"] == "unnamed":
            # The program has ended, and the garbage collector has not freed the optimizer yet.
            continue
        if number in births_of_unused:
            holder = f"{name_of_type(type(gathered.by_id[number]))} in {found['holder']}"
            found |= {"group": f"{number} {holder}", "holder": holder, "kind": UNUSED}
        group = groups.setdefault(
            found.pop("group"), {**found, "bytes": 0, "tensors": 0, "roots": set(), "births": set()}
        )
        # The graph whose node keeps the tensor, and the tensor's own graph if it has saved storages.
        group["roots"].update(root for root in (graph, number if number in saved else None) if root)
        of_copy = gathered.storages_of_copies.get(number, ())
        group["tensors"] += len(of_copy) if of_copy else number in direct
        for pointer in {*of_copy, *saved.get(number, ()), direct.get(number, 0)} - placed - {0}:
            if pointer in named and pointer != direct.get(number) and not of_copy:
                continue
            placed.add(pointer)
            group["bytes"] += block_bytes(pointer)
            if number not in births_of_unused:
                group["births"].add(block_step(pointer))
        group["births"].update(births_of_unused.get(number, ()))
    for group in groups.values():
        roots = group.pop("roots")
        group["graphs"] = len(roots)
        group["nodes"] = sum(gathered.graphs.by_root[root][0] for root in roots)
    return list(groups.values()), described == len(gathered.targets)


def _holders(why: str, begin: float, seconds: float) -> tuple[list[dict], bool, str]:
    """Returns the holders, whether the search was complete, and the reason if it was not
    (empty: lack of time)."""
    if why_not := why_not_searchable():
        return [], False, why_not
    reason = _unknown()
    deadline, end = begin + seconds * SEARCHING, begin + seconds
    gathered = Gathered(deadline)
    reason = reason or gathered.reason
    search, births_of_unused, are_known = _search(gathered, why, deadline, end)
    groups, are_described = _grouped(gathered, search, births_of_unused, why, end)
    is_whole = not reason and gathered.graphs.is_whole and search.is_whole
    is_whole = is_whole and gathered.is_whole and are_described and are_known
    return _judged(groups), is_whole, reason


def _only_in_optimizers(
    modules: list, optimizers: list, names: Names, own: list[int], deadline: float
) -> tuple[list, bool]:
    """Returns the optimizers whose parameters are of no module and have no name in the program, each with
    only these parameters, and whether the search for names was complete. `own` has the ids of the search's
    own objects."""
    # The garbage collector does not know who refers to a frozen object.
    found = unused_parameters(modules, optimizers) if not gc.get_freeze_count() else []
    wanted = {id(parameter) for each in found for parameter in each.parameters}
    excluded = [*own, id(found), *(id(table) for each in found for table in (each.parameters, *each.tables))]
    left = int((deadline - time.monotonic()) * 1000)
    pairs = find_referrers(gc.get_objects, list(wanted), excluded, max(left, 0)) if wanted else []
    if pairs is None:
        return [], False
    pairs = iter(pairs)
    named = {child for parent, child in zip(pairs, pairs, strict=True) if not is_own(parent)}
    named |= {number for number in wanted if names.variable(number) is not None}
    for each in found:
        each.parameters[:] = [parameter for parameter in each.parameters if id(parameter) not in named]
    return [each for each in found if each.parameters], True


def _node_of(tensor):
    try:
        return grad_fn_of(tensor) if is_plain(type(tensor)) else None
    except Exception:
        # The tensor may be a view that was changed in place.
        return None


def _goes_on(births: list[int], step: int) -> bool:
    """Returns True if the last of these steps is recent: the time since then, less AGE, is at most twice the
    average distance between the steps."""
    births = [born for born in births if born >= 0]
    return (step - AGE - births[-1]) * (len(births) - 1) <= 2 * (births[-1] - births[0])


def _judged(groups: list[dict]) -> list[dict]:
    """Gives each holder a verdict, such as growing from step to step. Returns at most HOLDERS holders: first
    those with a verdict in RETAINED, then the others, largest first. Drops holders below MIN_BYTES."""
    step = current_step()
    for group in groups:
        births = sorted(group.pop("births"))
        old = [born for born in births if 0 <= born <= step - AGE]
        if group["kind"] == "traceback" and old:
            verdict = TRACEBACK
        elif group["kind"] == UNUSED:
            verdict = GROWS if len(old) >= FEWEST_STEPS and _goes_on(births, step) else UNUSED
        elif len(old) > 1 and _goes_on(births, step) and not group["needed_by"]:
            verdict = GROWS if old[0] <= max(FIRST_STEPS, step // 2) else WINDOW
        elif births and births[0] <= step - AGE:
            verdict = OLD
        else:
            verdict = RECENT
        group["verdict"] = verdict
        group["first_step"], group["last_step"] = (births[0], births[-1]) if births else (None, None)
        group["steps"] = len(births)
        group["holder"] = group["holder"][:MAX_TEXT]
    groups = [group for group in groups if group["bytes"] >= MIN_BYTES]
    groups.sort(key=lambda group: (group["verdict"] not in RETAINED, -group["bytes"]))
    return groups[:HOLDERS]


def _record(why: str, holders: list[dict], is_whole: bool, reason: str, begin: float) -> None:
    number = _state["walks"]
    for holder in holders:
        text = json.dumps({"walk": number, **{key: holder[key] for key in KEYS}}, ensure_ascii=True)
        record_retained(text)
    retained = [holder for holder in holders if holder["verdict"] in RETAINED]
    summary = {
        "walk": number,
        "why": why,
        "step": current_step(),
        "holders": len(holders),
        "retained": len(retained),
        "bytes": sum(holder["bytes"] for holder in retained),
        "is_whole": is_whole,
        "reason": reason,
        "ms": round((time.monotonic() - begin) * 1000),
    }
    record_retained(json.dumps(summary))


KEYS = ("holder", "verdict", "bytes", "tensors", "graphs", "nodes", "first_step", "last_step", "steps") + (
    "kind",
    "name",
    "owner",
    "file",
    "line",
    "line_is",
    "needed_by",
)


# The number of searches left for OOMs. It is limited, because a program may try many sizes until one fits.
_ooms_left = [3]


def retained(*_) -> list[dict]:
    """Searches for `memtrace.retained()`. Returns the holders."""
    return walk("call")


def retained_at_oom(*_) -> None:
    """Searches after an OOM."""
    _ooms_left[0] -= 1
    if _ooms_left[0] >= 0:
        walk("oom")


def retained_growth(*_) -> None:
    """Searches because memory grows from step to step, if the run has lasted long enough."""
    begin, seconds = time.monotonic(), RETAINED_MS / 1000
    if RETAINED_IS_BOUNDED:
        seconds = min(seconds, GROWTH_SHARE * (begin - _state["begin"]) - _state["growth"])
    if seconds >= min(LEAST_SECONDS, RETAINED_MS / 1000):
        walk("growth", seconds)
        _state["growth"] += time.monotonic() - begin


def retained_on_request(*_) -> None:
    """Searches for `memtrace leaks --holders --pid`."""
    walk("command")


def retained_at_exit(*_) -> None:
    """Searches at the end of the program if memory has grown, or if an optimizer has parameters of no
    module."""
    if is_growing() or _have_unused():
        walk("exit")


def _have_unused() -> bool:
    """Returns True if an optimizer has parameters of no module and without a name."""
    if current_step() < 1 or why_not_searchable():
        return False
    try:
        end = time.monotonic() + RETAINED_MS / 1000
        things = live_objects(Module, Optimizer)
        optimizers = [thing for thing in things if issubclass(type(thing), Optimizer)]
        if not optimizers:
            return False
        modules = [thing for thing in things if issubclass(type(thing), Module)]
        names = Names(*running_variables([]), main_code(), Lines(end))
        own = [id(things), id(optimizers), id(modules)]
        with without_torch_function(), without_torch_dispatch():
            return bool(_only_in_optimizers(modules, optimizers, names, own, end)[0])
    except Exception as error:
        count("search for what is retained", error)
        return False
