"""Creates the digests of many traces, in one process or on the nodes of a Ray cluster, and collects them."""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _command
from ._text import first_line

ENDING = ".digest.parquet"
ENGINES = ("local", "ray")
# A task that fails because of its machine (it died, or a disk was full) is retried on another machine.
RETRIES = 3


@dataclass
class Collected:
    """The digests of a job."""

    files: dict[Path, str] = field(default_factory=dict)
    """The path of each digest in the folder, with a text that names the trace or the file that it is from."""
    failed: dict[str, str] = field(default_factory=dict)
    """The traces without a digest, and the reason for each."""


def collect(paths: Iterable[str], folder: Path, engine: str, every_node: bool = False) -> Collected:
    """Makes the digests of the traces at `paths` (folders, files and patterns) in `folder`. A path that is
    itself a digest is used unchanged. No file that is already in `folder` is changed, because it may be the
    only digest of its process, or one of `paths` that is read later.

    With `engine="ray"`, the tasks run on the cluster that Ray finds, each on a node that can read its trace.
    With `every_node`, each node searches for `paths` on its own disk; otherwise all nodes share them.

    Raises ValueError for an unknown engine or without a path, TraceError when no path matches, ImportError
    without Ray."""
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: choose one of {', '.join(ENGINES)}")
    if every_node and engine != "ray":
        raise ValueError('every_node needs engine="ray"')
    paths = [str(path) for path in paths]
    if not paths:
        raise ValueError("name at least one trace or folder of traces")
    results = _by_ray(paths, every_node) if engine == "ray" else _by_one_process(paths)
    collected = Collected()
    folder.mkdir(parents=True, exist_ok=True)
    for place, (digests, why) in results:
        if why is not None:
            collected.failed[place] = why
        for name, content in digests:
            file = _kept(folder, name, content)
            collected.files.setdefault(file, place if place.endswith(ENDING) else f"{place}: {name}")
    if not collected.files and not collected.failed:
        raise _command.TraceError(f"no trace at {', '.join(paths)}")
    collected.files = dict(sorted(collected.files.items()))
    return collected


# The digests of a place, as names and contents, or the reason why it has no digest.
_Digests = tuple[list[tuple[str, bytes]], "str | None"]


def places(paths: Iterable[str]) -> list[str]:
    """Returns the folders and files at `paths` on this machine, each once.

    A folder without a trace is replaced by its subfolders, so a path can name the
    folder of all runs of a job. A folder of digests is replaced by these, and by
    itself if it has a trace without a digest."""
    found: dict[str, None] = {}
    for path in paths:
        # An existing path is not a pattern: a folder may be called `run[1]`.
        is_pattern = glob.has_magic(path) and not os.path.lexists(path)
        matching = sorted(glob.glob(path)) if is_pattern else [path]
        for match in matching:
            for place in _runs(match):
                found[os.path.realpath(place)] = None
    return list(found)


def _runs(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    names = sorted(os.listdir(path))
    digests = [name for name in names if name.endswith(ENDING)]
    yield from (os.path.join(path, name) for name in digests)
    known = {_process(name.removesuffix(ENDING)) for name in digests}
    traces = (_command.plain_name(name) for name in names if _command.is_trace(name))
    if any(_process(trace.removesuffix(".csv")) not in known for trace in traces):
        yield path
    elif not digests:
        folders = (os.path.join(path, name) for name in names)
        yield from (folder for folder in folders if os.path.isdir(folder))


def _process(stem: str) -> str:
    """Returns the name of a trace or part without its part number."""
    return re.sub(r"\.part\d+(-\d+)?$", "", stem)


def digest(place: str) -> _Digests:
    """Returns the digests of the traces in one folder or file, or the reason why it has no digests.

    Leaves out the digests that the folder itself has."""
    if place.endswith(ENDING):
        try:
            return [(os.path.basename(place), Path(place).read_bytes())], None
        except OSError as error:
            return [], str(error)
    with tempfile.TemporaryDirectory(prefix="memtrace-digest-") as folder:
        try:
            _command.run(["export", "--to", "digest", place, "-o", f"{folder}/"])
        except _command.TraceError as error:
            return [], str(error).removeprefix(f"{place}: ")
        made = (file for file in sorted(Path(folder).iterdir()) if not Path(place, file.name).exists())
        return [(file.name, file.read_bytes()) for file in made], None


def _by_one_process(paths: list[str]) -> Iterator[tuple[str, _Digests]]:
    for place in places(paths):
        yield place, digest(place)


def _by_ray(paths: list[str], every_node: bool) -> Iterator[tuple[str, _Digests]]:
    try:
        import ray
    except ImportError as error:
        raise ImportError('the engine "ray" needs Ray: pip install "gpu-memtrace[ray]"') from error
    started = not ray.is_initialized()
    if started:
        # Uses the cluster that RAY_ADDRESS names, or else this machine's, or else a new one for this process.
        ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
    try:
        yield from _on_cluster(ray, paths, every_node)
    finally:
        if started:
            ray.shutdown()


def _on_cluster(ray: Any, paths: list[str], every_node: bool) -> Iterator[tuple[str, _Digests]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # If a node dies, Ray runs its tasks on other nodes. A trace that only the dead node
    # could read has no digest.
    settings = {"max_retries": RETRIES, "num_cpus": 1}
    find, make = ray.remote(**settings)(places), ray.remote(**settings)(digest)
    nodes = [node for node in ray.nodes() if node["Alive"]] if every_node else [None]
    searches = {}
    for node in nodes:
        options: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        searches[find.options(**options).remote(paths)] = (node, options)
    waiting = {}
    for search, (node, options) in searches.items():
        where = "" if node is None else f"{node['NodeManagerHostname']}:"
        try:
            found = ray.get(search)
        except ray.exceptions.RayError as error:
            yield where or ", ".join(paths), ([], first_line(error))
            continue
        waiting.update({make.options(**options).remote(place): f"{where}{place}" for place in found})
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        for reference in done:
            place = waiting.pop(reference)
            try:
                yield place, ray.get(reference)
            except ray.exceptions.RayError as error:
                yield place, ([], first_line(error))


def _kept(folder: Path, name: str, content: bytes) -> Path:
    """Returns the file in `folder` with this digest: the one that is already there, or a new one with a name
    that no file has. Names alone are not unique, because containers may share host names and process ids."""
    # DuckDB accepts only names in UTF-8.
    name = name.encode("utf-8", "backslashreplace").decode()
    stem, number, file = name.removesuffix(ENDING), 1, folder / name
    while os.path.lexists(file):
        if file.is_file() and file.read_bytes() == content:
            return file
        number += 1
        file = folder / f"{stem}-{number}{ENDING}"
    file.write_bytes(content)
    return file
