"""Adds the hooks to hatchling with which pip gets the metadata without a build.

Hatchling leaves these hooks out for pip, because a build hook may add dependencies. Our build hook adds none.
Without these hooks, pip builds the wheel, for minutes, in the step that it calls "Preparing metadata".
"""

import os

os.environ.pop("PIP_BUILD_TRACKER", None)

from hatchling.build import *  # noqa: E402, F403
