"""`python -m memtrace` is the command `memtrace`."""

import os
import sys

from ._command import TraceError, find

try:
    command = find()
except TraceError as error:
    sys.exit(f"memtrace: {error}")
os.execv(command, [command, *sys.argv[1:]])
