//! The functions with which a program names its memory: those of `include/memtrace.h` from C, and
//! `python/memtrace/_marks.py` around them.

use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_trace::EventName;
use memtrace_trace::text::NONE;

#[expect(dead_code, reason = "each test crate uses its own part")]
mod common;
use common::{Trace, Traced, compiled, library, untraced};

const RUNTIME: &str = "libcudart.so.12";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn program(target: &str, more: &[&str]) -> PathBuf {
    compiled("fakes/cudart.c", RUNTIME, &[]);
    let include = format!("-I{}", root().join("include").display());
    let mut arguments = vec![include.as_str(), RUNTIME];
    arguments.extend(more);
    compiled("api/api.c", target, &arguments)
}

/// Every process that inherits `LD_PRELOAD` also loads the dependencies of this library, so they are few.
#[test]
fn the_preloaded_library_needs_only_libc_the_unwinder_and_the_loader() {
    let mut readelf = Command::new("readelf");
    let output = readelf.args(["--dynamic", "--wide"]).arg(library("libmemtrace.so")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let needed = text.lines().filter(|line| line.contains("(NEEDED)"));
    let mut names: Vec<&str> =
        needed.filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']'))).collect();
    names.sort_unstable();
    assert_eq!(names, ["ld-linux-x86-64.so.2", "libc.so.6", "libgcc_s.so.1"]);
}

#[test]
fn c_api_names_the_owner_of_memory_and_pause_loses_no_event() {
    let ran = Traced::new(&program("api", &[]), &[]).run();
    assert_eq!(ran.stderr(), "");
    assert_eq!(ran.numbers(), [1, 0, 1, 1, 2, 2, 1, 1, 0, 1, 0, -1, 1, 0]);
    let trace = ran.trace();
    let owner = |bytes| {
        let row = trace.allocation(bytes);
        (row.phase.as_str(), row.module.as_str(), row.step)
    };
    assert_eq!(owner(101), (NONE, NONE, 3));
    assert_eq!(owner(102), ("eval", "Net", 3));
    // In a pause a range has no row, but memory still belongs to it.
    assert_eq!(owner(103), ("eval", "Net.unseen", 3));
    assert_eq!(owner(104), ("eval", "Net.late", 4));
    assert_eq!(owner(105), ("decode", NONE, 4));
    assert_eq!(owner(106), (NONE, NONE, 4));

    let ranges: Vec<(EventName, &str)> = trace
        .rows
        .iter()
        .filter(|row| row.delta == 0)
        .map(|row| {
            assert_eq!(row.api, "memtrace", "{row:?}");
            (row.event, row.name.as_str())
        })
        .collect();
    use EventName::{Mark, RangeBegin, RangeEnd};
    assert_eq!(
        ranges,
        [
            (RangeBegin, "phase:eval"),
            (RangeBegin, "Net"),
            (Mark, "while paused"),
            // The range began before the pause, so its end has a row.
            (RangeEnd, "Net"),
            // The range began in the pause and is still open.
            (RangeBegin, "module:Net.late"),
            (RangeEnd, "module:Net.late"),
            (RangeEnd, "phase:eval"),
            (RangeBegin, "phase:decode"),
            (RangeEnd, "phase:decode"),
            (Mark, "step:-1"),
            (Mark, NONE),
            (Mark, "the \u{fffd} end"),
        ]
    );
}

#[test]
fn c_api_does_nothing_without_the_preload() {
    // Also in an executable at a fixed address, where the linker may resolve the missing functions to null.
    for (target, more) in [("api", &[][..]), ("api-fixed", &["-no-pie", "-fno-pie"])] {
        let output = untraced(&program(target, more), &[]).output().unwrap();
        assert!(output.status.success(), "{target}: {}", output.status);
        let numbers: Vec<i32> =
            String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers, [0, 0, 0, 0, 0, -1, -1, 0, 0, -1, -1, -1, 0, 0], "{target}");
    }
}

#[test]
fn c_api_answers_and_does_nothing_with_enabled_0() {
    let ran = Traced::new(&program("api", &[]), &[]).env("MEMTRACE_ENABLED", "0").run();
    assert_eq!(ran.numbers(), [0, 0, 0, 0, 0, -1, -1, 0, 0, -1, -1, -1, 0, 0]);
    assert!(ran.files().is_empty());
}

const SCRIPT: &str = r#"
import memtrace, sys

@memtrace.phase("decorated")
def twice():
    memtrace.mark("in a function")
    return 2

print(memtrace.is_traced())
memtrace.step(5)
with memtrace.phase("eval"), memtrace.module("Net.fc"), memtrace.op("mine::op"):
    memtrace.mark("inside")
try:
    with memtrace.range("forward"):
        raise KeyError
except KeyError:
    memtrace.mark("outside")
with memtrace.paused():
    with memtrace.phase("unseen"):
        memtrace.mark("paused")
        with memtrace.paused():
            pass
        print(memtrace.is_paused())
print(memtrace.is_paused(), twice(), twice(), memtrace.flush())
memtrace.mark("a\0b é \ud800")
"#;

fn python(command: &mut Command) -> String {
    command.args(["-c", SCRIPT]).env("PYTHONPATH", root().join("python"));
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python3 is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn python_api_wraps_the_c_api_and_does_nothing_without_the_preload() {
    let mut alone = untraced(Path::new("python3"), &[]);
    assert_eq!(python(&mut alone), "False\nFalse\nFalse 2 2 True\n");

    let folder = tempfile::TempDir::new().unwrap();
    let mut traced = untraced(Path::new("python3"), &[]);
    traced.env("LD_PRELOAD", library("libmemtrace.so")).env("MEMTRACE_OUT", folder.path());
    assert_eq!(python(&mut traced), "True\nTrue\nFalse 2 2 True\n");
    let files: Vec<PathBuf> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let trace = Trace::read(file);
    let marks: Vec<_> = trace
        .of(EventName::Mark)
        .into_iter()
        .map(|row| (row.name.as_str(), row.phase.as_str(), row.module.as_str(), row.op.as_str(), row.step))
        .collect();
    assert_eq!(
        marks,
        [
            ("inside", "eval", "Net.fc", "mine::op", 5),
            ("outside", NONE, NONE, NONE, 5),
            ("paused", "unseen", NONE, NONE, 5),
            ("in a function", "decorated", NONE, NONE, 5),
            ("in a function", "decorated", NONE, NONE, 5),
            ("a b é ?", NONE, NONE, NONE, 5),
        ]
    );
    assert!(trace.rows.iter().all(|row| row.name != "phase:unseen"));
    let begins = trace.of(EventName::RangeBegin).len();
    assert_eq!(begins, trace.of(EventName::RangeEnd).len());
}
