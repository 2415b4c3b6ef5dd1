"""Runs a script, and then writes torch's peaks of the device as JSON: peaks.py OUT SCRIPT ARGUMENT...

    peaks.py OUT SCRIPT ARGUMENT... / SCRIPT ARGUMENT...

runs each script in a forked child of one process, which imports torch once, and writes OUT.0, OUT.1, ...
"""

import json
import os
import runpy
import sys
from pathlib import Path


def forked(out, commands):
    """Returns the file and the words of one command in a child. The parent ends after the last child."""
    import torch._dynamo  # noqa: F401  (the first step of an optimizer imports it)

    for number, command in enumerate(commands):
        child = os.fork()
        if child == 0:
            return f"{out}.{number}", command.split()
        os.waitpid(child, 0)
    os._exit(0)


out, *words = sys.argv[1:]
if "/" in words:
    out, words = forked(out, " ".join(words).split(" / "))
script, *arguments = words
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
