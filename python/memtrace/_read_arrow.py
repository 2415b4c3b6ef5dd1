"""Reads the files of a run with pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute
import pyarrow.csv

from ._frames import QUOTED

if TYPE_CHECKING:
    from ._read import Source

TYPES = {"integer": pyarrow.int64(), "text": pyarrow.string()}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# The exceptions of `read_files` for a damaged file.
ERRORS = (pyarrow.ArrowException,)


def read_files(files: list[Source], columns: list[dict[str, Any]]) -> pyarrow.Table:
    """Returns the `columns` of all `files`, which `memtrace check --files --json` lists."""
    return pyarrow.concat_tables(_read_file(file, columns) for file in files)


def _read_file(file: Source, columns: list[dict[str, Any]]) -> pyarrow.Table:
    compression = next((how for ending, how in COMPRESSIONS.items() if file.path.endswith(ending)), None)
    names = [column["name"] for column in columns]
    content = file.path if file.lines is None else pyarrow.py_buffer(file.lines)
    with pyarrow.input_stream(content, compression=compression) as stream:
        table = pyarrow.csv.read_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(skip_rows_after_names=file.repeated),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=names,
                # An older file may lack columns.
                include_missing_columns=True,
                column_types={column["name"]: TYPES[column["type"]] for column in columns},
                strings_can_be_null=False,
            ),
        )
    for index, column in enumerate(columns):
        values = table.column(index)
        if values.null_count:
            values = values.fill_null(column["default"])
            table = table.set_column(index, column["name"], values)
        if column["type"] == "text" and file.may_have_formulas:
            quoted = pyarrow.compute.match_substring_regex(values, QUOTED)
            if pyarrow.compute.any(quoted).as_py():
                plain = pyarrow.compute.utf8_slice_codeunits(values, 1)
                table = table.set_column(
                    index, column["name"], pyarrow.compute.if_else(quoted, plain, values)
                )
    return table
