"""Installs the kernel that the JSON in the first argument describes.

`memtrace kernel` runs it in the Python of the kernel: Jupyter's own code knows the folders of kernels."""

import importlib
import json
import sys
import tempfile
from pathlib import Path

# The exit status when a package is missing: the command then tries the next Python.
MISSING = 3

try:
    for package in ("ipykernel", "memtrace._magics"):
        importlib.import_module(package)
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
except ImportError as error:
    print(error.name or error, file=sys.stderr)
    sys.exit(MISSING)

request = json.loads(sys.argv[1])
manager = KernelSpecManager()
name = request["name"]
if request["remove"]:
    try:
        words = manager.get_kernel_spec(name).argv
    except NoSuchKernel:
        sys.exit(f"no kernel is called {name}; jupyter kernelspec list lists them")
    if "--ext=memtrace" not in words:
        sys.exit(f"the kernel {name} is not one of memtrace's; it stays")
    print(f"removed {manager.remove_kernel_spec(name)}")
    sys.exit()
spec = {
    "argv": [*request["command"], sys.executable, *request["arguments"]],
    "display_name": request["display_name"],
    "language": "python",
    # A signal would reach the kernel twice: as a member of the process group, and through memtrace run.
    "interrupt_mode": "message",
    "metadata": {"debugger": True},
}
prefix = sys.prefix if request["sys_prefix"] else request["prefix"]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
    try:
        place = manager.install_kernel_spec(folder, kernel_name=name, user=prefix is None, prefix=prefix)
    except (OSError, ValueError) as error:
        sys.exit(f"the kernel cannot be installed: {error}")
print(f"installed the kernel {name} in {place}; JupyterLab shows it as {spec['display_name']}")
