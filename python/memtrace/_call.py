"""Calls a pickled function in a process of its own: _call.py FILE. `memtrace.estimate` writes the file."""

import sys

with open(sys.argv[1], "rb") as file:
    import pickle

    # Not this package's folder, which is the first entry of a script's path.
    sys.path, main, call = pickle.load(file)
if main:
    import runpy
    import types

    # The functions of the caller's own script are in `__main__`, as multiprocessing does it.
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(main, run_name="__mp_main__"))
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
pickle.loads(call)()
