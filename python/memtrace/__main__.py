"""Runs the command `memtrace` for `python -m memtrace`, but answers `ranks --engine` in Python."""

import os
import sys

from ._command import TraceError, find

if sys.argv[1:2] == ["ranks"] and any(word.split("=")[0] == "--engine" for word in sys.argv):
    from ._job_ranks import main

    # The command writes UTF-8, whatever the locale.
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[2:]))
try:
    command = find()
except TraceError as error:
    sys.exit(f"memtrace: {error}")
os.execv(command, [command, *sys.argv[1:]])
