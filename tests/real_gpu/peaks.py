"""Runs a script, and then writes torch's peaks of the device as JSON: peaks.py OUT SCRIPT ARGUMENT..."""

import json
import os
import runpy
import sys
from pathlib import Path

out, script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).resolve().parent))
runpy.run_path(script, run_name="__main__")

import torch  # noqa: E402  (the script imports torch first, in its own way)

stats = torch.cuda.memory_stats()
Path(out).write_text(
    json.dumps({what: stats[f"{what}_bytes.all.peak"] for what in ("allocated", "reserved")})
)
# The figures are complete. In one of about 100 runs the interpreter's own end aborts: a thread of autograd
# that still has a Python object asks for the GIL, and CPython before 3.14 ends that thread inside C++ code.
sys.stdout.flush()
os._exit(0)
