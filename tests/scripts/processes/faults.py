"""Sets up the fault that argv[1] names around the tracer, then allocates like any program."""

import os
import resource
import shutil
import socket
import sys
from pathlib import Path

how = sys.argv[1]
out = Path(os.environ.get("MEMTRACE_OUT", "memtrace-out"))
mine = f"{socket.gethostname()}.r0.{os.getpid()}.csv"

if how == "file size limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
elif how == "planted link" and "MEMTRACE_OUT" in os.environ:
    out.mkdir(parents=True, exist_ok=True)
    (out / mine).symlink_to(sys.argv[2])
elif how == "planted file" and "MEMTRACE_OUT" in os.environ:
    out.mkdir(parents=True, exist_ok=True)
    (out / mine).write_text("somebody else's\n")

import torch

for round in range(300):
    kept = [torch.empty(1000 * (i + 1), dtype=torch.uint8, device="cuda") for i in range(20)]
    if how == "vanished folder" and round == 100:
        shutil.rmtree(out, ignore_errors=True)
    if how == "replaced libraries" and round == 100:
        # Installers write a new file and give it the old name.
        for library in map(Path, sys.argv[2:]):
            new = library.with_suffix(".new")
            new.write_bytes(b"not a library")
            new.replace(library)
print("allocated", torch.cuda.memory_allocated())
