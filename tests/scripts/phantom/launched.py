"""Prints the arguments and variables that its launcher gave it, as one line of JSON."""

import json
import os
import sys

print(json.dumps({"argv": sys.argv[1:], "variables": dict(os.environ)}), flush=True)
