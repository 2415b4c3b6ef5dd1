"""Reads the rows of a run into a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

from . import _command, _frames

Trace = Union[str, "os.PathLike[str]"]
# The folder in which the newest run is the default trace.
DEFAULT = "memtrace-out"


class Source(NamedTuple):
    """A file of a run."""

    path: str
    # The whole lines of the file if its last line was cut; otherwise None.
    lines: bytes | None
    # The number of rows after the header that repeat rows of an earlier part.
    repeated: int
    # True if a text may have the quote that protects a formula from spreadsheets.
    may_have_formulas: bool


def read(
    trace: Trace = DEFAULT,
    *,
    columns: Sequence[str] | None = None,
    rank: int | None = None,
    backend: str | None = None,
) -> Any:
    """Returns the rows of all ranks of a run, and of all parts of a rotated trace, as one DataFrame.

    trace    a file, or the folder of a run; by default the newest run in `memtrace-out`
    columns  only these columns; reading fewer columns is faster
    rank     only this rank
    backend  `polars`, `pandas` or `pyarrow`; by default polars if it is installed, else pandas. Each backend
             keeps the data in Arrow's format.

    The columns follow the trace format: integers are 64-bit and text is text. Rows are ordered by rank,
    process and file. A later part of a rotated trace begins with rows that repeat the live memory. These are
    left out, so the sum of `delta_bytes` over the rows of `alloc`, `free`, `tag`, `live` and `brief` is the
    live memory.
    The trace of a killed process is completed first, as by every command.

    Raises TraceError if there is no trace, or it cannot be read.

    >>> rows = read("gpt", columns=["event", "delta_bytes"])
    >>> len(rows)
    3024"""
    backend = _frames.backend(backend)
    only = [f"--rank={rank}"] if rank is not None else []
    arguments = ["check", "--files", *only, "--", os.fspath(trace)]
    answer, _ = _command.answer(arguments)
    known = {column["name"]: column for column in answer["columns"]}
    wanted = list(known) if columns is None else list(columns)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise _command.TraceError(f"no column {', '.join(unknown)}; the columns are {', '.join(known)}")
    if backend == "polars":
        from ._read_polars import ERRORS, read_files
    else:
        from ._read_arrow import ERRORS, read_files
    try:
        table = read_files([_source(file) for file in answer["files"]], [known[name] for name in wanted])
    except (OSError, *ERRORS) as error:
        raise _command.TraceError(f"{os.fspath(trace)}: {error}") from error
    if backend == "pandas":
        import pandas

        return table.to_pandas(types_mapper=pandas.ArrowDtype)
    return table


def _source(file: dict[str, Any]) -> Source:
    """Returns the source for a file as `memtrace check --files --json` lists it.

    An incomplete last row (of a cut copy, or while the program writes) is left out. For a cut copy, reports
    do this only with `lenient=True`."""
    path, lines = file["file"], None
    if path.endswith(".csv"):
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - 1, 0))
            if stream.read(1) != b"\n":
                stream.seek(0)
                content = stream.read()
                lines = content[: content.rfind(b"\n") + 1]
    return Source(path, lines, file["repeated_rows"], file["formulas"] != 0)
