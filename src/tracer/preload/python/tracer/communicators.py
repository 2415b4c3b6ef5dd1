"""Names NCCL's communicators after PyTorch's process groups."""

import os
import sys

from .failures import count
from .native import name_communicator, nameable_communicators

# The number of communicators at the last call of `name_groups` that asked PyTorch for names.
_asked = 0


def _nodes_of(ranks: list) -> str:
    """Returns a text with the number of a group's ranks on this machine, or an empty
    text if it is unknown."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    own = os.environ.get("RANK", "")
    if not (size.isdecimal() and own.isdecimal() and int(size)):
        return ""
    here = sum(rank // int(size) == int(own) // int(size) for rank in ranks)
    return f", {here} on this node"


def _text_of(c10d, group) -> str:
    world = c10d._world
    described = getattr(group, "group_desc", "")
    name = described if described and described != "undefined" else f"group {world.pg_names.get(group, '')}"
    ranks = list(world.pg_group_ranks.get(group, ()))
    return f"{name}, {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}{_nodes_of(ranks)}"


def name_groups() -> None:
    """Records the names of the process groups for their communicators, if there are new communicators."""
    global _asked
    known = nameable_communicators()
    if known in (0, _asked):
        return
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    torch = sys.modules.get("torch")
    if c10d is None or torch is None:
        return
    _asked = known
    for group in list(c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
            # Before PyTorch 2.7, there is no `_comm_ptr`, so the group gets no name.
            pointer = getattr(backend, "_comm_ptr", lambda: 0)()
            if pointer:
                name_communicator(pointer, _text_of(c10d, group))
        except RuntimeError:
            # `_get_backend` raises this error for a group without a backend for GPUs.
            continue
        except Exception as error:
            count("name of a communicator", error)
