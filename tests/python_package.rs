//! The Python package `memtrace`: traces as DataFrames, answers as objects, against the command's own figures.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use memtrace_trace::units::{Unit, parse_bytes};
use tempfile::TempDir;

use crate::common::command::root;
use crate::common::torch::{Torch, cache, clean, memtrace, missing, scripts, succeeded, text};

/// Runs Python code in a folder, with the package of this repository.
fn python(torch: &Torch, folder: &Path, code: &str) -> Output {
    let mut command: Command = torch.command();
    command.args(["-c", code]).current_dir(folder).env("PYTHONPATH", root().join("python"));
    command.output().unwrap()
}

/// Runs a case of `scripts/package/reading.py` in a folder.
fn checked(torch: &Torch, case: &str, folder: &Path) {
    let mut command = torch.command();
    command.arg(scripts().join("package/reading.py")).arg(case).current_dir(folder);
    command.env("PYTHONPATH", root().join("python"));
    succeeded(case, &command.output().unwrap());
}

/// Traces four ranks on simulated GPUs, in compressed parts of 64 KiB.
fn four_ranks(torch: &Torch) -> TempDir {
    let folder = TempDir::new().unwrap();
    let mut run = memtrace();
    run.args(["run", "--quiet", "--phantom", "4xh100-80g", "-o", "out", "--"]).arg(&torch.python);
    run.args(["-m", "torch.distributed.run", "--nproc-per-node=4"]).arg(scripts().join("package/ranks.py"));
    run.env("MEMTRACE_ROTATE", "64k").env("MEMTRACE_COMPRESS", "zst").current_dir(&folder);
    succeeded("four ranks", &run.output().unwrap());
    folder
}

#[test]
fn read_of_four_ranks_and_compressed_parts_equals_the_command() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = four_ranks(&torch);
    let files: Vec<PathBuf> =
        std::fs::read_dir(folder.path().join("out")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let parts = files.iter().filter(|file| file.to_string_lossy().ends_with(".csv.zst")).count();
    assert!(parts >= 8, "two parts of each rank at least: {files:?}");
    checked(&torch, "ranks", folder.path());
}

#[test]
fn check_files_and_read_refuse_files_that_are_not_traces_and_say_why() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    checked(&torch, "wrong", folder.path());
}

#[test]
fn every_report_is_a_function_of_the_package_and_gives_the_answer_of_the_command() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let names: Vec<String> =
        memtrace_analysis::reports::REPORTS.iter().map(|report| report.name().replace('-', "_")).collect();
    let code = format!("import memtrace; [getattr(memtrace, name) for name in {names:?}]");
    succeeded("names", &python(&torch, root(), &code));
    checked(&torch, "reports", &root().join("tests/fixtures"));
}

#[test]
fn estimate_runs_a_script_a_function_and_a_recipe_on_a_simulated_card() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let mut command = torch.command();
    command.arg(scripts().join("package/estimate.py")).current_dir(&folder);
    succeeded("estimate", &command.env("PYTHONPATH", root().join("python")).output().unwrap());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "the runs left files");
}

#[test]
fn the_examples_in_the_docstrings_of_the_package_hold() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let code = "import doctest, importlib, sys; \
                results = [doctest.testmod(importlib.import_module(f'memtrace.{name}')) for name in ('_marks', '_page', '_read', '_reports')]; \
                sys.exit(any(result.failed or not result.attempted for result in results))";
    succeeded("examples", &python(&torch, &root().join("tests/fixtures"), code));
}

#[test]
fn ranks_by_ray_and_by_one_process_are_those_of_the_report() {
    let ray = cache().join("ray");
    if !ray.join(".list").exists() {
        return missing("Ray is not installed: run scripts/env ray");
    }
    let mut command = clean(&ray.join("bin/python"));
    command.arg(scripts().join("package/job_ranks.py")).arg(root().join("tests/fixtures"));
    succeeded("ranks", &command.env("PYTHONPATH", root().join("python")).output().unwrap());
}

#[test]
fn ranks_of_digests_that_are_damaged_or_lie_are_named_or_answered() {
    let ray = cache().join("ray");
    if !ray.join(".list").exists() {
        return missing("DuckDB is not installed: run scripts/env ray");
    }
    let mut command = clean(&ray.join("bin/python"));
    command.arg(scripts().join("package/hostile_digests.py")).arg(root().join("tests/fixtures"));
    succeeded("ranks", &command.env("PYTHONPATH", root().join("python")).output().unwrap());
}

#[test]
fn the_package_is_typed() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    assert!(root().join("python/memtrace/py.typed").exists());
    let code = "import inspect, memtrace\n\
                for name in memtrace.__all__:\n\
                \x20   value = getattr(memtrace, name)\n\
                \x20   assert inspect.getdoc(value), name\n\
                \x20   if inspect.isfunction(value):\n\
                \x20       assert 'return' in value.__annotations__, name\n";
    succeeded("types", &python(&torch, root(), code));
    let mut alone = clean(Path::new("python3"));
    let isolated =
        "import sys; sys.path.insert(0, sys.argv[1]); import memtrace; memtrace.step(1); print('no torch')";
    alone.args(["-I", "-c", isolated]).arg(root().join("python"));
    assert_eq!(text(&alone.output().unwrap().stdout), "no torch\n");
}

/// A child process takes 700 bytes on device 1, and the test a number of bytes on device 0. A line for each
/// number: the device with the highest peak, whether the moment of this process's peak is still reported, and the
/// owners on that device.
const PEAK_OF_A_CHILD: &str = "
from pathlib import Path
from types import SimpleNamespace
from memtrace import _blocks
from memtrace._pytest import child_traces
child_traces.names = lambda: frozenset({'child.csv'})
child_traces.meta_of = lambda path: {'start_unix_ns': 5}
child_traces.is_of_test = lambda meta: True
child_traces.peaks_of = lambda path: (9, {1: 700})
moment = _blocks.Owner('train', 'encoder', '(none)', '(none)')
for peak in [800, 600]:
    use = _blocks.Use(peak=peak, moment=moment, peaks={0: peak})
    child_traces.add_children(use, frozenset(), SimpleNamespace(path=Path('own.csv')), [])
    print(use.device, use.moment == moment, [owner.module for _, owner in use.at_peak])
";

#[test]
fn a_peak_of_a_child_on_another_device_has_no_moment_of_this_process() {
    let mut command = Command::new("python3");
    command.args(["-c", PEAK_OF_A_CHILD]).env("PYTHONPATH", root().join("python"));
    assert_eq!(text(&command.output().unwrap().stdout), "0 True []\n1 False ['(1 child process)']\n");
}

/// A line for each size: what the package parses, and what it prints for a number of bytes.
const SIZES: &str = "
import sys
from memtrace import _sizes
for line in sys.stdin.read().splitlines():
    kind, _, text = line.partition(' ')
    try:
        print(_sizes.parse(text) if kind == 'parse' else _sizes.show(int(text)))
    except ValueError:
        print('refused')
";

#[test]
fn sizes_are_parsed_and_printed_by_the_package_as_by_the_command() {
    let texts = [
        "0",
        "512",
        "10k",
        "2m",
        "1.5g",
        "80 GB",
        "80GiB",
        "500 MB",
        "0.3 TiB",
        "2 tb",
        "24b",
        " 64m ",
        "",
        "g",
        "ib",
        "5 iB",
        "12 parsecs",
        "-1g",
        "1.5.5g",
        ".5g",
        "5.",
        ".g",
        "1e3g",
        "+5g",
        "9007199254740993",
        "9223372036854775807",
        "9223372036854775808",
        "99999999999t",
    ];
    let mut sizes: Vec<i64> = vec![0, 1, -1, 1023, -1023, 123_456_789, -3 << 30];
    for unit in [1i64 << 10, 1 << 20, 1 << 30, 1 << 40] {
        let below = unit - unit / 1024 / 200;
        sizes.extend([unit - 1, unit, unit + 1, below - 1, below, below + 1, 1 - below, -below]);
    }
    let asked = texts.map(|text| format!("parse {text}\n")).into_iter();
    let asked: String = asked.chain(sizes.iter().map(|size| format!("show {size}\n"))).collect();
    let mut command = Command::new("python3");
    command.args(["-c", SIZES]).env("PYTHONPATH", root().join("python"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(asked.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let parsed = texts.map(|text| parse_bytes(text).map_or("refused".into(), |bytes| bytes.to_string()));
    let printed = sizes.iter().map(|size| Unit::Auto.show(*size).to_string());
    let expected: Vec<String> = parsed.into_iter().chain(printed).collect();
    for ((question, answer), expected) in asked.lines().zip(text(&output.stdout).lines()).zip(&expected) {
        assert_eq!(answer, expected, "{question}");
    }
    assert_eq!(text(&output.stdout).lines().count(), expected.len());
}
