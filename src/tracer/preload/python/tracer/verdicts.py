"""Judges the holders that a search has found: whether each keeps memory of earlier steps without need."""

from __future__ import annotations

from typing import NamedTuple

from .holder_groups import HolderGroup
from .native import VERDICTS, current_step
from .reference_paths import TRACEBACK, UNUSED

# The verdicts, which src/trace/verdict.rs explains. Two of them have the name of the holder's kind.
GROWS, WINDOW, OLD, RECENT = "grows", "window", "old", "recent"
# The maximum number of holders in the answer of a search.
MOST_HOLDERS = 12
# Holders of fewer bytes are not reported.
MIN_BYTES = 64 << 10
# The age, in steps, from which a tensor counts as old. A loop variable keeps the previous step's tensor until
# it is assigned again, so an age of 1 is normal.
OLD_AGE = 2
# An optimizer that gets new parameters grows if they are from at least FEWEST_STEPS old steps.
FEWEST_STEPS = 3
# Tensors kept since one of the first FIRST_STEPS steps count as kept from the beginning.
FIRST_STEPS = 5
# The maximum length of a holder's text.
MAX_TEXT = 700


class Holder(NamedTuple):
    """A holder and its verdict. Its row in the trace has the same fields (docs/trace-format.md)."""

    holder: str
    verdict: str
    bytes: int
    tensors: int
    graphs: int
    nodes: int
    first_step: int | None
    last_step: int | None
    steps: int
    kind: str
    name: str
    owner: str
    file: str
    line: int
    line_is: str
    needed_by: str

    @property
    def is_retained(self) -> bool:
        """Whether the memory is kept without need."""
        return bool(VERDICTS[self.verdict])


def judge(groups: list[HolderGroup]) -> list[Holder]:
    """Gives each holder a verdict. Returns at most MOST_HOLDERS holders: first those that keep memory without
    need, then the others, largest first. Drops holders below MIN_BYTES."""
    step = current_step()
    holders = [_judged(group, step) for group in groups if group.bytes >= MIN_BYTES]
    holders.sort(key=lambda holder: (not holder.is_retained, -holder.bytes))
    return holders[:MOST_HOLDERS]


def _judged(group: HolderGroup, step: int) -> Holder:
    births, name = sorted(group.births), group.name
    return Holder(
        holder=name.text[:MAX_TEXT],
        verdict=_verdict(births, name.kind, bool(name.needed_by), step),
        bytes=group.bytes,
        tensors=group.tensors,
        graphs=len(group.roots),
        nodes=group.nodes,
        first_step=births[0] if births else None,
        last_step=births[-1] if births else None,
        steps=len(births),
        kind=name.kind,
        name=name.name,
        owner=name.owner,
        file=name.file,
        line=name.line,
        line_is=name.line_is,
        needed_by=name.needed_by,
    )


def _verdict(births: list[int], kind: str, is_needed: bool, step: int) -> str:
    """Returns the verdict on a holder of this kind whose blocks were allocated in the steps `births`, in
    order. A step below 0 is before training."""
    old = [born for born in births if 0 <= born <= step - OLD_AGE]
    if kind == TRACEBACK and old:
        return TRACEBACK
    if kind == UNUSED:
        return GROWS if len(old) >= FEWEST_STEPS and _goes_on(births, step) else UNUSED
    if len(old) > 1 and _goes_on(births, step) and not is_needed:
        return GROWS if old[0] <= max(FIRST_STEPS, step // 2) else WINDOW
    return OLD if births and births[0] <= step - OLD_AGE else RECENT


def _goes_on(births: list[int], step: int) -> bool:
    """Returns True if the last of these steps is recent: the time since then, less OLD_AGE, is at most twice
    the average distance between the steps."""
    births = [born for born in births if born >= 0]
    return (step - OLD_AGE - births[-1]) * (len(births) - 1) <= 2 * (births[-1] - births[0])
