//! The functions by which a program names its memory: the C functions of `include/memtrace.h`, and the
//! wrappers of `python/memtrace/_marks.py`.

use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_trace::EventName;
use memtrace_trace::text::NONE;

use crate::common::command::{memtrace, root};
use crate::common::pages;
use crate::common::running::Running;
use crate::common::terminal::Terminal;
use crate::common::{LOADER, Trace, Traced, compiled, library, untraced};

const RUNTIME: &str = "libcudart.so.12";

fn program(target: &str, more: &[&str]) -> PathBuf {
    compiled("fakes/cudart.c", RUNTIME, &[]);
    let include = format!("-I{}", root().join("include").display());
    let mut arguments = vec![include.as_str(), RUNTIME];
    arguments.extend(more);
    compiled("api/api.c", target, &arguments)
}

/// Every process that inherits `LD_PRELOAD` also loads the dependencies of this library, so their list stays
/// short.
#[test]
fn the_preloaded_library_needs_only_libc_the_unwinder_and_the_loader() {
    let mut readelf = Command::new("readelf");
    let output = readelf.args(["--dynamic", "--wide"]).arg(library("libmemtrace.so")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let needed = text.lines().filter(|line| line.contains("(NEEDED)"));
    let mut names: Vec<&str> =
        needed.filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']'))).collect();
    names.sort_unstable();
    let loader = LOADER.rsplit('/').next().unwrap();
    let mut expected = vec![loader, "libc.so.6", "libgcc_s.so.1"];
    // `scripts/aarch64` links for glibc 2.28, which has two more libraries.
    if cfg!(target_arch = "aarch64") && names.contains(&"libdl.so.2") {
        expected = vec![loader, "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libpthread.so.0"];
    }
    assert_eq!(names, expected);
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
    // The range of 103 was opened while tracing was paused: it writes no row, but still owns the memory.
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
    // The second program is linked at a fixed address (`-no-pie`), where the linker may resolve missing
    // functions to null.
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
memtrace.detail(steps=2)
try:
    memtrace.detail(0)
except ValueError:
    memtrace.flush()
else:
    print("a detail of no step")
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

/// Compiles a program that begins a step every millisecond.
fn stepping() -> PathBuf {
    compiled("fakes/cudart.c", RUNTIME, &[]);
    let include = format!("-I{}", root().join("include").display());
    compiled("api/steps.c", "steps", &[&include, RUNTIME])
}

/// Returns the detail marks of a trace, with their steps.
fn detail_marks(trace: &Trace) -> Vec<(i64, String)> {
    let marks = trace.of(EventName::Mark).into_iter().filter(|row| row.api == "detail");
    marks.map(|row| (row.step, row.name.clone())).collect()
}

#[test]
fn c_api_asks_for_the_detail_of_the_next_steps() {
    let ran = Traced::new(&stepping(), &["/nowhere", "asks"]).env("MEMTRACE_DETAIL", "steps:3").run();
    let on = |step, reason: &str| (step, format!("detail on: {reason}"));
    let off = |step| (step, "detail off".to_owned());
    let expected = [on(3, "schedule"), off(4), on(6, "asked for"), on(7, "asked for"), off(8)];
    assert_eq!(detail_marks(&ran.trace()), expected);
    // By default every step is detailed, so the program's request adds no mark.
    let ran = Traced::new(&stepping(), &["/nowhere", "asks"]).run();
    assert_eq!(detail_marks(&ran.trace()), []);
}

#[test]
fn c_api_begins_any_number_of_steps_and_each_mark_has_its_number() {
    let ran = Traced::new(&stepping(), &["/nowhere", "many"]).env("MEMTRACE_BUFFER", "8m").run();
    let trace = ran.trace();
    let marks: Vec<String> = trace.of(EventName::Mark).into_iter().map(|row| row.name.clone()).collect();
    assert_eq!(marks, (0..=40_000).map(|step| format!("step:{step}")).collect::<Vec<_>>());
}

/// Runs `memtrace live --detail` with these arguments. Returns its status, stdout and stderr.
fn ask_for_detail(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = memtrace().args(["live", "--detail"]).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Starts a program that takes steps; in the mode `still` it takes none.
fn running(mode: &str, detail: &str) -> Running {
    Running::start(&stepping(), &[Running::END, mode], &[("MEMTRACE_DETAIL", detail)])
}

#[test]
fn detail_of_a_running_process_is_asked_for_by_its_id() {
    let stepping = running("", "off");
    let (status, answer, messages) = ask_for_detail(&[&stepping.pid, "--steps", "3"]);
    assert_eq!((status, messages.as_str()), (Some(0), ""));
    // Two requests at once: each is answered, or fails because the other one is pending.
    let both: Vec<_> = std::thread::scope(|scope| {
        let ask = || scope.spawn(|| ask_for_detail(&[&stepping.pid, "--steps", "1"]));
        [ask(), ask()].map(|thread| thread.join().unwrap()).into()
    });
    assert!(both.iter().any(|(status, ..)| *status == Some(0)), "{both:?}");
    for (status, _, messages) in &both {
        assert!(*status == Some(0) || messages.contains("another request to process"), "{both:?}");
    }
    let marks = detail_marks(&stepping.trace());
    let (first, on) = (marks[0].0, "detail on: asked for".to_owned());
    let expected = [(first, on.clone()), (first + 1, on.clone()), (first + 2, on)];
    assert_eq!(marks[..3], expected);
    assert!(answer.contains(&format!("records steps {first} to {} in full", first + 2)), "{answer}");
    let (command, shown) = pages::first_command("docs/detail.md");
    assert_eq!(command[..2], ["live", "--detail"]);
    assert_eq!(pages::without_numbers(&answer), pages::without_numbers(&shown));
}

#[test]
fn detail_of_a_process_that_cannot_give_it_is_an_error_or_waits() {
    let error = |arguments: &[&str], text: &str| {
        let (status, answer, messages) = ask_for_detail(arguments);
        assert_eq!((status, answer.as_str()), (Some(2), ""), "{messages}");
        assert!(messages.contains(text), "{messages}");
    };
    let own = std::process::id().to_string();
    error(&[&own], "has no memtrace journal");
    for steps in ["0", "-1", "1000001", "some"] {
        error(&[&own, &format!("--steps={steps}")], "invalid value");
    }
    error(&["0"], "invalid value");
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    error(&[&gone.id().to_string()], "is running");

    // The program begins no step, so the command gives up after 0 s.
    let mut still = running("still", "off");
    let (status, _, messages) = ask_for_detail(&[&still.pid, "--wait", "0"]);
    assert_eq!(status, Some(2), "{messages}");
    assert!(messages.contains("has not begun a step for 0 s"), "{messages}");
    still.end();

    let mut full = running("", "full");
    let (status, answer, _) = ask_for_detail(&[&full.pid]);
    assert_eq!(status, Some(0));
    assert!(answer.contains("records every step in full already"), "{answer}");
    full.end();
}

#[test]
fn live_asks_for_detail_by_a_key() {
    let watch = |running: &Running, columns| {
        let command =
            format!("{} live {} --interval 0.1", env!("CARGO_BIN_EXE_memtrace"), running.out().display());
        let terminal = Terminal::open(columns, 40, &command)?;
        terminal.wait("d detail");
        Some(terminal)
    };
    let stepping = running("", "off");
    let Some(terminal) = watch(&stepping, 110) else { return };
    terminal.keys("d");
    let screen = terminal.wait(&format!("detail: process {} records steps ", stepping.pid));
    terminal.keys("d");
    terminal.keys("h");
    terminal.wait("record the next 5 steps of the shown process in full");
    terminal.keys("x");
    let trace = stepping.trace();
    terminal.wait("ended after");
    terminal.keys("d");
    terminal.wait("detail: no process of this run is running");
    let marks = detail_marks(&trace);
    let on = |step| (step, "detail on: asked for".to_owned());
    let first = marks[0].0;
    assert_eq!(marks[..5], [on(first), on(first + 1), on(first + 2), on(first + 3), on(first + 4)]);
    assert!(screen.contains(&format!("steps {first} to {} in full", first + 4)), "{screen}");

    // The program begins no step, so a request stays pending. `memtrace live --detail` gives up; a second key
    // press makes a new request.
    let mut still = running("still", "off");
    let Some(terminal) = watch(&still, 60) else { return };
    terminal.keys("d");
    terminal.wait("requested 5 steps of process");
    let (status, _, messages) = ask_for_detail(&[&still.pid, "--wait", "0"]);
    assert_eq!(status, Some(2), "{messages}");
    terminal.keys("d");
    // The screen has the first request's line until the key is read; the help shows that it was read.
    terminal.keys("h");
    terminal.wait("record the next");
    terminal.keys("x");
    still.end();
    terminal.wait("ended before its next");
}

#[test]
fn out_folder_that_is_removed_ends_the_trace_and_the_message_does_not_blame_the_disk() {
    let place = tempfile::tempdir().unwrap();
    let log = place.path().join("log");
    let mut still = Running::start(
        &stepping(),
        &[Running::END, "still"],
        &[("MEMTRACE_LOG_FILE", log.to_str().unwrap()), ("MEMTRACE_FLUSH_MS", "10")],
    );
    let has_trace = |folder: &Path| std::fs::read_dir(folder).is_ok_and(|mut files| files.next().is_some());
    while !has_trace(&still.out()) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::fs::remove_dir_all(still.out()).unwrap();
    still.end();
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(said.contains("the trace ends early") && said.contains("the file was removed"), "{said}");
    assert!(said.contains("leave a trace in place while its program runs"), "{said}");
    assert!(!said.contains("free some space"), "{said}");
}
