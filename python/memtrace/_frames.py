"""Makes DataFrames with polars or pandas, whichever is installed."""

from __future__ import annotations

from typing import Any

# Matches a text with the `'` that the writer puts before a text that a spreadsheet would run as a formula.
QUOTED = r"^'+[=+\-@\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}]"
BACKENDS = ("polars", "pandas", "pyarrow")


def backend(wanted: str | None) -> str:
    """Returns the name of the library to use: the `wanted` one, or by default the first that is installed.

    Raises ImportError if neither is installed, and ValueError for an unknown name."""
    if wanted is not None:
        if wanted not in BACKENDS:
            raise ValueError(f"backend={wanted!r}: choose one of {', '.join(BACKENDS)}")
        return wanted
    for name, modules in [("polars", ["polars"]), ("pandas", ["pandas", "pyarrow"])]:
        try:
            for module in modules:
                __import__(module)
        except ImportError:
            continue
        return name
    raise ImportError(
        "a DataFrame needs polars, or pandas with pyarrow: pip install polars; "
        "without them, use the reports' dicts"
    )


def frame(rows: list[dict[str, Any]], wanted: str | None = None) -> Any:
    """Returns a DataFrame of `rows`. A field that a row lacks is null."""
    name = backend(wanted)
    if name == "polars":
        import polars

        return polars.DataFrame(rows, infer_schema_length=None)
    if name == "pyarrow":
        import pyarrow

        fields = dict.fromkeys(field for row in rows for field in row)
        return pyarrow.table({field: [row.get(field) for row in rows] for field in fields})
    import pandas

    return pandas.DataFrame(rows)
