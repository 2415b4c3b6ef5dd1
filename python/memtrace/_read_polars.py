"""Reads the files of a run with polars."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import polars

from ._frames import QUOTED

if TYPE_CHECKING:
    from ._read import Source

TYPES = {"integer": polars.Int64, "text": polars.String}
# The exceptions of `read_files` for a damaged file.
ERRORS = (polars.exceptions.PolarsError,)


def read_files(files: list[Source], columns: list[dict[str, Any]]) -> polars.DataFrame:
    """Returns the `columns` of all `files`, which `memtrace check --files --json` lists."""
    return polars.concat(_read_file(file, columns) for file in files)


def _read_file(file: Source, columns: list[dict[str, Any]]) -> polars.DataFrame:
    def content() -> Any:
        return file.path if file.lines is None else io.BytesIO(file.lines)

    header = polars.read_csv(content(), n_rows=0).columns
    present = [column for column in columns if column["name"] in header]
    frame = polars.read_csv(
        content(),
        # Without any of the columns, another one gives the number of rows.
        columns=[column["name"] for column in present] or header[:1],
        schema_overrides={column["name"]: TYPES[column["type"]] for column in present}
        or dict.fromkeys(header[:1], polars.String),
        skip_rows_after_header=file.repeated,
    )
    missing = [column for column in columns if column not in present]
    frame = frame.with_columns(
        polars.lit(column["default"], TYPES[column["type"]]).alias(column["name"]) for column in missing
    )
    texts = [column["name"] for column in present if column["type"] == "text" and file.may_have_formulas]
    # Finds the columns that may have a quoted text: it begins with `'`, which sorts before `(`, as few other
    # texts do. This comparison costs less than a search with the pattern.
    candidates = frame.select((polars.col(texts) < "(").any()) if texts else polars.DataFrame()
    for name in candidates.columns:
        if candidates[name].item():
            text = polars.col(name)
            unquoted = polars.when(text.str.contains(QUOTED)).then(text.str.slice(1)).otherwise(text)
            frame = frame.with_columns(unquoted.alias(name))
    return frame.select(column["name"] for column in columns)
