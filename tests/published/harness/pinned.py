"""Files of public repositories that a case reads, each at a commit and with a known hash."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from pathlib import Path

ADDRESS = "https://raw.githubusercontent.com"


def read_pinned(repository: str, commit: str, path: str, blob: str) -> str:
    """Returns the text of a file of a GitHub repository. The text is in the cache folder, or is fetched.

    `blob` is the file's hash in Git. Ends the process if the text has another hash."""
    kept = Path(os.environ["MEMTRACE_CACHE"]) / repository.rpartition("/")[2] / blob
    if not kept.exists():
        with urllib.request.urlopen(f"{ADDRESS}/{repository}/{commit}/{path}", timeout=60) as answer:
            content = answer.read()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
    content = kept.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != blob:
        raise SystemExit(f"{kept} is not {path} of {repository} at {commit}; remove it")
    return content.decode()
