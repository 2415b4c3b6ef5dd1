"""Compares what the package reads with the command's figures: reading.py CASE, in the folder of the case."""

import contextlib
import gzip
import os
import shutil
import sys
from pathlib import Path

import memtrace
import polars as pl

BLOCKS = ["alloc", "free", "tag", "live", "brief"]


def refused(call, *words, kind=memtrace.TraceError):
    """Checks that a call raises `kind`, with these words in its text."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), f"{error} lacks one of {words}"
        return
    raise AssertionError(f"nothing was raised; expected {words}")


def ranks():
    """Four ranks in compressed parts: each way to read gives the same rows, and they sum to the command's."""
    rows = memtrace.read("out")
    assert isinstance(rows, pl.DataFrame)
    assert rows["rank"].unique().sort().to_list() == [0, 1, 2, 3]
    assert rows.null_count().sum_horizontal().item() == 0
    processes = {process["rank"]: process for process in memtrace.summary("out")["processes"]}
    for rank, process in processes.items():
        own = rows.filter(pl.col("rank") == rank)
        # The rows must have no gaps, and must not include the rows that a later part repeats.
        assert own["seq"].to_list() == list(range(1, process["rows"] + 1)), (rank, own["seq"].len())
        device = process["devices"][0]
        on_gpu = own.filter(pl.col("device") == device["device"])
        peak = device["peak_allocated"]
        assert on_gpu["allocated_bytes"].max() == peak["bytes"]
        blocks = own.filter(pl.col("event").is_in(BLOCKS) & (pl.col("device") == device["device"]))
        assert blocks.filter(pl.col("seq") <= peak["seq"])["delta_bytes"].sum() == peak["bytes"]
        assert blocks["delta_bytes"].sum() == device["at_end_allocated_bytes"]
        assert memtrace.read("out", rank=rank).equals(own)
        by_phase = memtrace.peak("out", by="phase", as_of=True, rank=rank)
        sums = blocks.filter(pl.col("seq") <= peak["seq"]).group_by("phase").agg(pl.col("delta_bytes").sum())
        sums = {phase: size for phase, size in sums.iter_rows() if size}
        command = {group["key"]: group["bytes"] for group in by_phase["groups"]}
        none = command.pop("(no phase)", 0)
        assert sums.pop("(none)", 0) == none and sums == command, (sums, command)
    for column, kind in rows.schema.items():
        names = ("event", "api", "source", "op", "module", "phase", "category", "name", "dtype", "shape")
        text = column in names
        assert kind == (pl.String if text else pl.Int64), (column, kind)
    arrow = memtrace.read("out", backend="pyarrow")
    assert pl.from_arrow(arrow).equals(rows)
    pandas = memtrace.read("out", backend="pandas", columns=["delta_bytes", "module"])
    assert [str(kind) for kind in pandas.dtypes] == ["int64[pyarrow]", "string[pyarrow]"]
    assert pandas["delta_bytes"].sum() == rows["delta_bytes"].sum()
    assert memtrace.read("out", columns=["module"]).columns == ["module"]
    refused(lambda: memtrace.read("out", columns=["modul"]), "no column modul", "module")
    refused(lambda: memtrace.read("out", rank=9), "9")
    refused(lambda: memtrace.read("out", backend="spark"), "polars", kind=ValueError)


def wrong():
    """Folders and files that are no trace."""
    refused(lambda: memtrace.read("absent"), "absent", "no such file or folder")
    refused(memtrace.read, "memtrace-out", "memtrace run")
    os.mkdir("empty")
    refused(lambda: memtrace.read("empty"), "no trace here")
    refused(lambda: memtrace.report("empty"), "no trace here")
    Path("other.csv").write_text("a,b\n1,2\n")
    refused(lambda: memtrace.read("other.csv"), "other.csv")
    Path("binary.csv").write_bytes(os.urandom(5000))
    refused(lambda: memtrace.read("binary.csv"), "binary.csv")
    refused(lambda: memtrace.peak("empty", by="nothing"), "nothing", "module")
    refused(lambda: memtrace.peak("empty", nothing=1), "--nothing")
    refused(lambda: memtrace.ranks(["empty"]), "engine", kind=ValueError)
    refused(lambda: memtrace.ranks([], engine="local"), "at least one", kind=ValueError)
    refused(lambda: memtrace.ranks("empty", engine="local", top=-1), "-1", kind=ValueError)
    refused(lambda: memtrace.ranks("empty", engine="spark"), "local, ray", kind=ValueError)
    refused(lambda: memtrace.step("first"), "first", kind=ValueError)

    # Puts the traces of two programs into one folder, whose name looks like an option.
    fixtures = Path(__file__).resolve().parents[2] / "fixtures"
    os.mkdir("-mixed")
    for name, fixture in [("a", "gpt"), ("b", "leaks")]:
        packed = next((fixtures / fixture).glob("*.csv.gz"))
        with gzip.open(packed) as source, open(f"-mixed/{name}.csv", "wb") as target:
            shutil.copyfileobj(source, target)
    processes = memtrace.summary("-mixed")["processes"]
    assert memtrace.read("-mixed").height == sum(process["rows"] for process in processes) > 0

    # A file with an additional column, as a later version may write it, must be read; a file of an unknown
    # format must be refused.
    lines = Path("-mixed/a.csv").read_text().splitlines()
    Path("later.csv").write_text(
        "".join(f"{line},{'?,?,7' if n else 'dtype,shape,new'}\n" for n, line in enumerate(lines))
    )
    assert memtrace.read("later.csv").height == len(lines) - 1
    # The file itself is older than these columns. Each backend keeps the number of its rows.
    assert "dtype" not in lines[0]
    for backend in ("polars", "pyarrow", "pandas"):
        for columns in (["dtype", "shape"], ["dtype", "seq"]):
            older = memtrace.read("-mixed/a.csv", columns=columns, backend=backend)
            names = older.column_names if backend == "pyarrow" else list(older.columns)
            assert (names, len(older)) == (columns, len(lines) - 1), (backend, columns, len(older))
    Path("future.csv").write_text("\n".join(lines).replace("memtrace/1", "memtrace/2") + "\n")
    refused(lambda: memtrace.read("future.csv"), "memtrace/2")
    # From a copy that was cut inside a row, all rows before that row must be read. Reports need `lenient`.
    whole = Path("-mixed/a.csv").read_bytes()
    for kept in (len(whole) - 1, len(whole) - 40, len(whole) // 2):
        Path("cut.csv").write_bytes(whole[:kept])
        rows = whole[:kept].count(b"\n") - 1
        for backend in ("polars", "pyarrow", "pandas"):
            frame = memtrace.read("cut.csv", backend=backend)
            assert len(frame) == rows, (kept, backend, len(frame), rows)
        last = memtrace.read("cut.csv").tail(1)
        assert last.null_count().sum_horizontal().item() == 0 and last["seq"].item() == rows, last
    in_row = whole.rfind(b"\n", 0, len(whole) // 2) + 3
    Path("cut.csv").write_bytes(whole[:in_row])
    refused(lambda: memtrace.summary("cut.csv"), "cut off", "--lenient")
    [process] = memtrace.summary("cut.csv", lenient=True)["processes"]
    assert process["rows"] == len(memtrace.read("cut.csv")), process["rows"]
    Path("damaged.csv").write_bytes(whole[:in_row] + b"\xff" * 100 + whole[in_row:])
    for backend in ("polars", "pyarrow", "pandas"):
        refused(lambda backend=backend: memtrace.read("damaged.csv", backend=backend), "damaged.csv")
    # A text that a spreadsheet would run as a formula has a quote in the file. The frame must have the text
    # without it.
    at = lines[0].split(",").index("op")
    quoted = next(n for n, line in enumerate(lines) if ",alloc," in line and '"' not in line)
    fields = lines[quoted].split(",")
    fields[at] = "'=cmd"
    Path("quoted.csv").write_text("\n".join([*lines[:quoted], ",".join(fields), *lines[quoted + 1 :]]) + "\n")
    for backend in ("polars", "pyarrow", "pandas"):
        ops = memtrace.read("quoted.csv", columns=["op"], backend=backend)["op"]
        assert "=cmd" in (ops.to_pylist() if backend == "pyarrow" else list(ops)), backend
    # With `formulas=0` in the end row, the package does not look for such texts, so the quote stays. With any
    # other end row, it must look.
    whole = Path("quoted.csv").read_text()
    for said, shown in [
        (" formulas=0", "'=cmd"),
        (" formulas=1", "=cmd"),
        (" formulas=x", "=cmd"),
        ("", "=cmd"),
    ]:
        Path("said.csv").write_text(whole.removesuffix("\n") + said + "\n")
        for backend in ("polars", "pyarrow"):
            ops = memtrace.read("said.csv", columns=["op"], backend=backend)["op"].unique()
            assert shown in (ops.to_pylist() if backend == "pyarrow" else list(ops)), (said, backend)


def reports():
    """Compares the answers with the command's, and checks that every list in them is a table."""
    for name in memtrace.__all__:
        call = getattr(memtrace, name)
        if name in ("diff", "budget") or getattr(call, "__module__", "") != "memtrace._reports":
            continue
        with contextlib.suppress(TypeError):
            answer = call("gpt")
            if isinstance(answer, memtrace.Answer):
                assert answer["report"] == name.replace("_", "-")
                for path, rows in answer.lists().items():
                    assert answer.table(path).height == len(rows) > 0, (name, path)
    peak = memtrace.peak("gpt", by="module", depth=2)
    assert peak.table()["bytes"].sum() == peak["peak"]["bytes"] and "GPT" in peak.text
    assert peak.table(backend="pandas")["bytes"].sum() == peak["peak"]["bytes"]
    refused(lambda: peak.table("nothing"), "groups", kind=KeyError)
    gate = memtrace.diff("leaks", "gpt", fail_over="0%")
    assert gate.status == 3 and gate["broken"], gate
    less = memtrace.advise("gpt", batch="x2")
    assert less["report"] == "advise" and less.table().height == 1
    # A list stands for the command's list with commas; False and None leave an option out.
    two = memtrace.advise("gpt", optimizer=["8bit", "in-backward"], lenient=False)
    assert two["devices"] == memtrace.advise("gpt", optimizer="8bit,in-backward")["devices"]
    one = memtrace.report("gpt", lenient=False, rank=None)
    assert one.html == memtrace.report("gpt").html
    page = memtrace.report("gpt", against="leaks")
    assert page.html.lower().startswith("<!doctype html>") and "srcdoc" in page._repr_html_()


{"ranks": ranks, "wrong": wrong, "reports": reports}[sys.argv[1]]()
