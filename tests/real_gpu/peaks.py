"""Runs a script, and then writes torch's peaks of the device as JSON: peaks.py OUT SCRIPT ARGUMENT..."""

import json
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
