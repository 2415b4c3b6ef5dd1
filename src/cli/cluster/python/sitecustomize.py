"""Runs at the start of each Python process of a rank among stand-ins, because `memtrace run --ranks` puts
this folder into PYTHONPATH.

It runs the program's own `sitecustomize`, and installs the stand-ins when `torch.distributed` is imported.
"""

import os
import sys


def give_way(folder):
    """Runs the program's own `sitecustomize`, which this one hides."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # After this file has run, the import system looks up the entry `sitecustomize` once more, so it must
        # exist even if the program has no `sitecustomize`.
        sys.modules.setdefault("sitecustomize", own)


def wait_for_torch(folder):
    """Inserts an import finder before the others, which installs the stand-ins after the module
    `torch.distributed.distributed_c10d` has run."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec, spec_from_file_location

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "torch.distributed.distributed_c10d":
                return None
            spec = PathFinder.find_spec(name, path, target)
            if spec is None or spec.loader is None:
                return None
            run_module = spec.loader.exec_module

            def exec_module(module):
                run_module(module)
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not Finder]
                file = os.path.join(folder, "memtrace_stand_ins.py")
                own = spec_from_file_location("memtrace_stand_ins", file)
                stand_ins = module_from_spec(own)
                own.loader.exec_module(stand_ins)
                stand_ins.install(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)


def end_with_launcher():
    """Lets the kernel end this rank with SIGTERM when `memtrace run`, its parent, is killed."""
    import ctypes
    import signal

    set_parent_death_signal = 1
    try:
        if os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe")) == "memtrace":
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        pass


if os.environ.get("MEMTRACE_PHANTOM_STORE"):
    end_with_launcher()
    wait_for_torch(os.path.dirname(os.path.abspath(__file__)))
give_way(os.path.dirname(os.path.abspath(__file__)))
