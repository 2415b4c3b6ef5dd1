"""Builds the command and both libraries with cargo, and puts them into the wheel.

`pip install .` calls this hook through hatchling. `scripts/wheel` and the tests set
two environment variables:

GPU_MEMTRACE_BUILT      a folder that already has the three built files, so that cargo is not called
GPU_MEMTRACE_PLATFORM   the platform of the wheel's name, such as manylinux_2_28_x86_64; it may be that of
                        another machine if the files are built
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMAND = "memtrace"
LIBRARIES = ["libmemtrace.so", "libmemtrace_phantom.so"]
MACHINES = ["x86_64", "aarch64"]


class BuildHook(BuildHookInterface):
    """The hook that hatchling finds in this file."""

    def initialize(self, version, build_data):
        """Adds the built files to a wheel; `version` is `editable` for `pip install -e`."""
        machine = platform.machine()
        if sys.platform != "linux" or machine not in MACHINES:
            raise RuntimeError(
                f"memtrace runs on Linux on x86-64 and aarch64 only, and this is {sys.platform} on {machine}"
            )
        wheel_platform = os.environ.get("GPU_MEMTRACE_PLATFORM", f"linux_{machine}")
        prebuilt = os.environ.get("GPU_MEMTRACE_BUILT")
        built = Path(prebuilt) if prebuilt else self.build()
        missing = [name for name in [COMMAND, *LIBRARIES] if not (built / name).is_file()]
        if missing:
            raise RuntimeError(f"{built} lacks {', '.join(missing)}")
        stripped = Path(tempfile.mkdtemp(prefix="gpu-memtrace-"))
        self.temporary = stripped
        for name in [COMMAND, *LIBRARIES]:
            shutil.copy2(built / name, stripped / name)
            if wheel_platform.endswith(machine):
                strip(stripped / name)
        # The command is a native program: it starts without an interpreter, and finds its libraries itself.
        build_data["shared_scripts"] = {str(stripped / COMMAND): COMMAND}
        include = "force_include_editable" if version == "editable" else "force_include"
        build_data[include].update({str(stripped / name): f"memtrace/lib/{name}" for name in LIBRARIES})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{wheel_platform}"

    def finalize(self, version, build_data, artifact_path):
        """Removes the stripped copies."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def build(self):
        """Builds the three files in the tree. Returns their folder."""
        cargo = shutil.which("cargo") or shutil.which("cargo", path=Path.home() / ".cargo/bin")
        if cargo is None:
            raise RuntimeError(
                "building memtrace from source needs Rust, and there is no cargo on the PATH; install Rust "
                "(https://rustup.rs), or install a wheel, which scripts/wheel builds on a machine that has it"
            )
        if shutil.which("cc") is None:
            raise RuntimeError(
                "building memtrace from source needs a C compiler, and there is no cc on the PATH; "
                "install gcc (apt-get install gcc libc6-dev)"
            )
        target = Path(self.root, "target")
        command = [cargo, "build", "--release", "--locked", "--target-dir", str(target)]
        print("gpu-memtrace:", " ".join(command), file=sys.stderr, flush=True)
        status = subprocess.run(command, cwd=self.root, stdout=sys.stderr, check=False).returncode
        if status != 0:
            raise RuntimeError(f"cargo build failed with status {status}; its own message is above")
        return target / "release"


def strip(file):
    """Removes the symbols for debuggers if binutils is installed; it knows this machine's files only."""
    program = shutil.which("strip")
    if program is not None:
        subprocess.run([program, str(file)], check=True)
