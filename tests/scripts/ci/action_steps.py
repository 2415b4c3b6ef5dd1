"""Runs the steps of `action.yml` in a shell, as a runner does.

    action_steps.py ACTION FOLDER NAME=VALUE...    inputs by name; the rest have their defaults

FOLDER is the checkout. Prints each step's name and status, and ends with the first status that is not 0.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

action, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
description = yaml.safe_load(action.read_text())
inputs = {name: str(value.get("default", "")) for name, value in description["inputs"].items()}
inputs |= dict(argument.split("=", 1) for argument in sys.argv[3:])
contexts = {"github.event_name": "pull_request", "github.event.pull_request.number": "7"}
contexts |= {f"inputs.{name}": value for name, value in inputs.items()}


def value_of(expression):
    """Returns the value of `${{ ... }}`: a name, or the first of several that is set."""
    names = (name.strip() for name in expression.split("||"))
    return next((contexts[name] for name in names if contexts.get(name)), "")


def is_met(condition):
    """Returns whether an `if:` holds, which compares names with texts."""
    parts = (part.split() for part in condition.split("&&"))
    return all((contexts.get(name, "") == text.strip("'")) == (sign == "==") for name, sign, text in parts)


for step in description["runs"]["steps"]:
    if not is_met(step.get("if", "github.event_name == 'pull_request'")):
        print(step["name"], "skipped")
        continue
    output = folder.parent / "output"
    output.write_text("")
    environment = os.environ | {
        "GITHUB_ACTION_PATH": str(action.parent),
        "GITHUB_STEP_SUMMARY": str(folder.parent / "summary.md"),
        "GITHUB_OUTPUT": str(output),
    }
    for name, text in step.get("env", {}).items():
        environment[name] = re.sub(r"\$\{\{(.*?)\}\}", lambda match: value_of(match[1]), text)
    status = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]], cwd=folder, env=environment
    ).returncode
    print(step["name"], status, flush=True)
    if status:
        sys.exit(status)
    for line in output.read_text().splitlines():
        name, text = line.split("=", 1)
        contexts[f"steps.{step['id']}.outputs.{name}"] = text
