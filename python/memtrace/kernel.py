"""`python -m memtrace.kernel install`: a Jupyter kernel of this Python that is traced.

python -m memtrace.kernel install                       the GPU of this machine
python -m memtrace.kernel install --phantom h100-80g    a simulated GPU: this machine needs none
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from . import _command


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m memtrace.kernel", description="Jupyter kernels that are traced"
    )
    actions = parser.add_subparsers(dest="action", metavar="install|remove", required=True)
    install = actions.add_parser("install", help="add a kernel of this Python")
    install.add_argument("--phantom", metavar="CARD", help="on this simulated GPU, such as h100-80g")
    install.add_argument("--name", help="the kernel's name [default: memtrace, or memtrace-CARD]")
    install.add_argument("--display-name", help="its name in the menu [default: Python (memtrace)]")
    place = install.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for this user [the default]")
    place.add_argument("--sys-prefix", action="store_true", help=f"for this environment, {sys.prefix}")
    place.add_argument("--prefix", metavar="DIR", help="for the environment in this folder")
    remove = actions.add_parser("remove", help="remove a kernel that install added")
    remove.add_argument("--name", default="memtrace")
    options = parser.parse_args(arguments)
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

        if options.action == "install":
            __import__("ipykernel")
    except ImportError as error:
        print(
            f"memtrace: a kernel needs ipykernel in {sys.executable}: pip install ipykernel ({error})",
            file=sys.stderr,
        )
        return 2
    manager = KernelSpecManager()
    if options.action == "remove":
        try:
            words = manager.get_kernel_spec(options.name).argv
        except NoSuchKernel:
            print(f"memtrace: there is no kernel {options.name}", file=sys.stderr)
            return 2
        if words[1:2] != ["run"]:
            print(f"memtrace: the kernel {options.name} is not one of memtrace's; it stays", file=sys.stderr)
            return 2
        print(f"removed {manager.remove_kernel_spec(options.name)}")
        return 0
    try:
        command = command_of(options.phantom)
    except _command.TraceError as error:
        print(f"memtrace: {error}", file=sys.stderr)
        return 2
    name = options.name or (f"memtrace-{slug(options.phantom)}" if options.phantom else "memtrace")
    card = f", {options.phantom}" if options.phantom else ""
    spec = {
        "argv": [
            *command,
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "--ext=memtrace",
            "-f",
            "{connection_file}",
        ],
        "display_name": options.display_name or f"Python (memtrace{card})",
        "language": "python",
        # A signal would reach the kernel twice: as a member of the process group, and through memtrace run.
        "interrupt_mode": "message",
        "metadata": {"debugger": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        prefix = sys.prefix if options.sys_prefix else options.prefix
        place = manager.install_kernel_spec(folder, kernel_name=name, user=prefix is None, prefix=prefix)
    print(f"installed the kernel {name} in {place}; JupyterLab shows it as {spec['display_name']}")
    return 0


def command_of(card: str | None) -> list[str]:
    """The command that starts a traced program.

    Raises TraceError when the card or a library does not exist."""
    command = [_command.find(), "run", "--quiet"]
    _command.run(["lib"])
    if card:
        # A wrong name would end the kernel before Jupyter hears of it.
        _command.run(["run", "--quiet", "--phantom", card, "--", "true"])
        command += ["--phantom", card]
    return [*command, "--"]


def slug(card: str) -> str:
    """A card as part of a kernel's name, in which few characters are allowed."""
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in card)


if __name__ == "__main__":
    sys.exit(main())
