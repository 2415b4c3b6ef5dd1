"""Runs the programs that stdin names, each in a fork of this process, which has imported their libraries.

A line of stdin is a JSON object: argv, env, cwd and log, the file for stdout and stderr. The answer is a line
with the process and its status. No import may call CUDA, which a fork cannot use afterwards.
"""

import atexit
import json
import os
import runpy
import sys
import threading
import traceback

import lightning  # noqa: F401
import timm  # noqa: F401
import torch._dynamo  # noqa: F401
import transformers  # noqa: F401


def run(job):
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    sys.argv = job["argv"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    process = os.fork()
    if process == 0:
        status = run(json.loads(line))
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(json.dumps([process, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])]), flush=True)
