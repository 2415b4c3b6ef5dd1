"""Reads the files of a run with polars."""

from __future__ import annotations

from typing import Any

import polars

from ._frames import QUOTED

TYPES = {"integer": polars.Int64, "text": polars.String}


def read_files(files: list[dict[str, Any]], columns: list[dict[str, Any]]) -> polars.DataFrame:
    """The `columns` of all `files`, as `memtrace files --json` lists both."""
    frames = [_read_file(file["file"], file["repeated_rows"], columns) for file in files]
    return polars.concat(frames)


def _read_file(path: str, repeated: int, columns: list[dict[str, Any]]) -> polars.DataFrame:
    header = polars.read_csv(path, n_rows=0).columns
    present = [column for column in columns if column["name"] in header]
    frame = polars.read_csv(
        path,
        columns=[column["name"] for column in present],
        schema_overrides={column["name"]: TYPES[column["type"]] for column in present},
        skip_rows_after_header=repeated,
    )
    missing = [column for column in columns if column not in present]
    frame = frame.with_columns(
        polars.lit(column["default"], TYPES[column["type"]]).alias(column["name"]) for column in missing
    )
    for column in present:
        if column["type"] == "text" and frame[column["name"]].str.starts_with("'").any():
            text = polars.col(column["name"])
            unquoted = polars.when(text.str.contains(QUOTED)).then(text.str.slice(1)).otherwise(text)
            frame = frame.with_columns(unquoted.alias(column["name"]))
    return frame.select(column["name"] for column in columns)
