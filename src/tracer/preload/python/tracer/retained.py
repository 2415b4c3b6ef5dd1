"""Searches for the holders of GPU memory that a step has left behind, for `memtrace leaks --holders`: when a
search runs, how long it may take, and what it writes into the trace.

    search_targets.py   gathers the tensors, graphs, models and optimizers whose holders are wanted
    holder_search.py    follows the objects that refer to them, up to a name of the program
    reference_paths.py  describes the way from that name to the target
    holder_groups.py    sums what each holder keeps
    verdicts.py         judges the holders

At its end, a search drops every reference, so it keeps no object alive afterwards. Other Python threads
continue during the search; objects that they release live until it ends. The search runs no code of the
program, and its time is limited (MEMTRACE_RETAINED). While the program runs, searches that it did not ask for
take at most 1% of its time so far.
"""

from __future__ import annotations

import json
import time
from _thread import allocate_lock
from typing import NamedTuple

from .failures import count
from .frames import Lines, is_layout_known, left_frames, running_variables
from .graphs import are_saved_tensors_known
from .holder_groups import group_by_holder
from .holder_search import HolderSearch
from .live_objects import live_objects, why_not_searchable
from .main_code import main_code
from .native import RETAINED_IS_BOUNDED, RETAINED_MS, current_step, is_growing, record_retained
from .reference_paths import Names
from .search_targets import SearchTargets
from .torch_api import Module, Optimizer, without_torch_dispatch, without_torch_function
from .unused_optimizers import unused_optimizers
from .verdicts import Holder, judge

# The share of a search's time after which it stops following references, and only names
# the holders found so far.
FOLLOWING = 0.75
# Searches that start because memory grows take at most this share of the run's time so far.
GROWTH_SHARE = 0.01
# A search that may take less time, in seconds, is left out: it would find little.
LEAST_SECONDS = 0.1

# Held during a search. A second search at the same time finds nothing.
_lock = allocate_lock()
_begin = time.monotonic()
# The number of searches so far.
_searches = 0
# The seconds that searches because memory grows took.
_growth_seconds = 0.0
# The number of searches left for OOMs. It is limited, because a program may try many sizes until one fits.
_oom_searches_left = 3


class Found(NamedTuple):
    """The result of a search."""

    holders: list[Holder]
    is_whole: bool
    # Why the search was not complete; empty if it was, or if its time ran out.
    reason: str


def _search(why: str, seconds: float = RETAINED_MS / 1000) -> list[Holder]:
    """Searches for at most some seconds, and records the holders in the trace. Returns them in the order of
    `judge`. `why` is the reason for the search: `call`, `oom`, `growth`, `command` or `exit`."""
    global _searches
    if not _lock.acquire(False):
        return []
    try:
        begin = time.monotonic()
        _searches += 1
        # The time from here to the last row belongs to no phase.
        record_retained(json.dumps({"walk": _searches, "begins": why}))
        with without_torch_function(), without_torch_dispatch():
            found = _find_holders(why, begin, seconds)
        _record(why, found, begin)
        return found.holders
    except Exception as error:
        count("search for what is retained", error)
        return []
    finally:
        _lock.release()


def _find_holders(why: str, begin: float, seconds: float) -> Found:
    if why_not := why_not_searchable():
        return Found([], False, why_not)
    unreadable = _unreadable()
    deadline, end = begin + seconds * FOLLOWING, begin + seconds
    targets = SearchTargets(deadline)
    # The variables of the failed request are named like running variables, because they are not memory that a
    # failed attempt has left behind.
    left = left_frames() if why == "oom" else []
    names = Names(*running_variables(left), main_code(), Lines(end))
    own = [*targets.own_ids(), id(left)]
    unused, are_unused_known = unused_optimizers(targets.modules, targets.optimizers, names, own, deadline)
    targets.add_unused(unused)
    # This list and its items refer to targets.
    del unused
    search = HolderSearch(names, targets.graphs.root_of, targets.frames, deadline)
    search.run(set(targets.ids), own)
    groups, are_all_named = group_by_holder(targets, search, why == "exit", end)
    reason = unreadable or targets.limit
    is_whole = not reason and targets.are_all_examined and targets.graphs.is_whole
    is_whole = is_whole and are_unused_known and search.is_whole and are_all_named
    return Found(judge(groups), is_whole, reason)


def _unreadable() -> str:
    """Returns a text that says what cannot be read in this program, or an empty text if
    everything can be read."""
    if not are_saved_tensors_known():
        return "the tensors that autograd's graphs saved cannot be read with this version of torch"
    return "" if is_layout_known() else "the variables of running functions cannot be read with this Python"


def _record(why: str, found: Found, begin: float) -> None:
    """Records a row for each holder, and a row for the search."""
    for holder in found.holders:
        record_retained(json.dumps({"walk": _searches, **holder._asdict()}, ensure_ascii=True))
    retained = [holder for holder in found.holders if holder.is_retained]
    summary = {
        "walk": _searches,
        "why": why,
        "step": current_step(),
        "holders": len(found.holders),
        "retained": len(retained),
        "bytes": sum(holder.bytes for holder in retained),
        "is_whole": found.is_whole,
        "reason": found.reason,
        "ms": round((time.monotonic() - begin) * 1000),
    }
    record_retained(json.dumps(summary))


def retained(*_) -> list[dict]:
    """Searches for `memtrace.retained()`. Returns the holders."""
    return [{**holder._asdict(), "is_retained": holder.is_retained} for holder in _search("call")]


def retained_at_oom(*_) -> None:
    """Searches after an OOM."""
    global _oom_searches_left
    if _oom_searches_left:
        _oom_searches_left -= 1
        _search("oom")


def retained_growth(*_) -> None:
    """Searches because memory grows from step to step, if the run has lasted long enough."""
    global _growth_seconds
    begin, seconds = time.monotonic(), RETAINED_MS / 1000
    if RETAINED_IS_BOUNDED:
        seconds = min(seconds, GROWTH_SHARE * (begin - _begin) - _growth_seconds)
    if seconds >= min(LEAST_SECONDS, RETAINED_MS / 1000):
        _search("growth", seconds)
        _growth_seconds += time.monotonic() - begin


def retained_on_request(*_) -> None:
    """Searches for `memtrace leaks --holders --pid`."""
    _search("command")


def retained_at_exit(*_) -> None:
    """Searches at the end of the program if memory has grown, or if an optimizer has parameters of no
    module."""
    if is_growing() or _has_unused_optimizer():
        _search("exit")


def _has_unused_optimizer() -> bool:
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
            return bool(unused_optimizers(modules, optimizers, names, own, end)[0])
    except Exception as error:
        count("search for what is retained", error)
        return False
