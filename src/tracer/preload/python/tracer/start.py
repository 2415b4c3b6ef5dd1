"""Starts the tracer, once torch is imported."""

from __future__ import annotations

import sys


def is_torch_imported() -> bool:
    """Returns True once `import torch` has finished. Torch's modules must not be read before."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return False
    return "torch.optim.optimizer" in sys.modules and "torch.nn.modules.module" in sys.modules


def start() -> dict | None:
    """Installs the tracer's hooks. Returns the functions that the library calls from then on, by name.
    Returns None if torch is not imported yet; the library then calls `start` again later."""
    if not is_torch_imported():
        return None
    # Imported here, because these modules read torch's modules while they are loaded.
    from .install import install
    from .known_frames import show_frames
    from .known_objects import make_graph_nodes

    show_frames()
    make_graph_nodes()
    return install()
