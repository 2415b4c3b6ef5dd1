"""Adds a Jupyter kernel that is traced, or removes it, for `python -m memtrace.kernel`.

The kernel runs the same Python as this module. Jupyter's own code finds the folders of kernels."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from . import _command

NAME = "memtrace"
# An argument that identifies memtrace's kernels, checked before one is removed.
_MARK = "--ext=memtrace"
_EXAMPLES = """examples:
  python -m memtrace.kernel install                      on the GPU of this machine
  python -m memtrace.kernel install --phantom h100-80g   on a simulated GPU, no device needed
  python -m memtrace.kernel remove memtrace-h100-80g     remove a kernel that install added
"""


def _refuse(why: str) -> NoReturn:
    """Ends the program as the command `memtrace` does when a request is invalid."""
    print(f"memtrace: {why}", file=sys.stderr)
    sys.exit(2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m memtrace.kernel",
        description="Add or remove a Jupyter kernel that runs this Python with memtrace.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    install = actions.add_parser("install", help="add a kernel: Jupyter shows it as Python (memtrace)")
    install.add_argument(
        "--phantom", metavar="CARD", help="simulate this GPU; memtrace run --phantom list lists the cards"
    )
    install.add_argument("--name", help="the kernel's name (default: memtrace, or memtrace-CARD)")
    install.add_argument("--display-name", help="its name in the menu (default: Python (memtrace))")
    place = install.add_mutually_exclusive_group()
    place.add_argument(
        "--sys-prefix", action="store_true", help="for this Python's environment (default: for this user)"
    )
    place.add_argument("--prefix", metavar="DIR", help="for the environment in this folder")
    remove = actions.add_parser("remove", help="remove a kernel that install added")
    remove.add_argument("name", nargs="?", default=NAME, help=f"the kernel's name (default: {NAME})")
    return parser.parse_args()


def _check_card(card: str) -> None:
    """Checks that `memtrace run` accepts the card, because otherwise the kernel could not start.

    Raises TraceError if it does not."""
    if card == "list":
        _refuse("--phantom list names no card; memtrace run --phantom list lists the cards")
    with tempfile.TemporaryDirectory() as folder:
        _command.run(["run", "--quiet", "--phantom", card, "-o", folder, "--", "true"])


def _install(manager: Any, request: argparse.Namespace) -> None:
    command = os.path.abspath(_command.find())
    words = [command, "run", "--quiet"]
    name, display_name = NAME, "Python (memtrace)"
    if request.phantom is not None:
        _check_card(request.phantom)
        words += ["--phantom", request.phantom]
        # Only a few characters are allowed in the name of a kernel.
        name = f"{NAME}-{re.sub('[^A-Za-z0-9._-]', '-', request.phantom)}"
        display_name = f"Python (memtrace, {request.phantom})"
    name = request.name or name
    launcher = ["-m", "ipykernel_launcher", _MARK, "-f", "{connection_file}"]
    spec = {
        "argv": [*words, "--", sys.executable, *launcher],
        "display_name": request.display_name or display_name,
        "language": "python",
        # A signal would reach the kernel twice: through the process group, and through memtrace run.
        "interrupt_mode": "message",
        "metadata": {"debugger": True},
    }
    prefix = sys.prefix if request.sys_prefix else request.prefix
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        try:
            place = manager.install_kernel_spec(folder, kernel_name=name, user=prefix is None, prefix=prefix)
        except (OSError, ValueError) as error:
            _refuse(f"the kernel cannot be installed: {error}")
    print(f"installed the kernel {name} in {place}; JupyterLab shows it as {spec['display_name']}")


def main() -> None:
    """Installs or removes a kernel, depending on the command line."""
    request = _arguments()
    try:
        importlib.import_module("ipykernel")
        kernelspec = importlib.import_module("jupyter_client.kernelspec")
    except ImportError as error:
        _refuse(
            f"{sys.executable} lacks {error.name or error}, which a kernel needs: "
            f"{sys.executable} -m pip install ipykernel"
        )
    manager = kernelspec.KernelSpecManager()
    if request.action == "install":
        try:
            _install(manager, request)
        except _command.TraceError as error:
            _refuse(str(error))
        return
    try:
        words = manager.get_kernel_spec(request.name).argv
    except kernelspec.NoSuchKernel:
        _refuse(f"no kernel is called {request.name}; jupyter kernelspec list lists them")
    if _MARK not in words:
        _refuse(f"the kernel {request.name} is not one of memtrace's, so it was not removed")
    print(f"removed {manager.remove_kernel_spec(request.name)}")


if __name__ == "__main__":
    main()
