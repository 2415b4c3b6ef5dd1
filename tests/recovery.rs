//! How the command finds and completes the traces of killed processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use memtrace_trace::EventName;
use memtrace_trace::csv::{RowReader, end_text};
use serde_json::Value;

use crate::common::command;
use crate::common::parts::parts_program;
use crate::common::{self, Trace, Traced, compiled, untraced};

const RUNTIME: &str = "libcudart.so.12";

/// Runs a process that kills itself after `rounds` rounds, with traces in `out`; most of its events are in
/// its journal.
fn killed(out: &Path, run: &str, rounds: &str) -> i64 {
    let traced = Traced::new(&parts_program("recovered"), &["kill", rounds]).env("MEMTRACE_OUT", out);
    let ran = traced.env("MEMTRACE_RUN_ID", run).env("MEMTRACE_FLUSH_MS", "60000").run();
    assert_eq!(ran.status(), 128 + 9, "{}", ran.stderr());
    ran.numbers()[0]
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn traces(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|file| file.to_string_lossy().ends_with(".csv")).collect();
    files.sort();
    files
}

fn ending(trace: &Path) -> Option<String> {
    let text = fs::read_to_string(trace).unwrap();
    end_text(text.lines().last()?.as_bytes())
}

fn journal(trace: &Path) -> PathBuf {
    PathBuf::from(&RowReader::open(trace).unwrap().meta().journal)
}

/// Returns the memory figures of `summary --json`, without the notes.
fn summary(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    let mut answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    answer.as_object_mut().unwrap().remove("footer");
    answer.as_object_mut().unwrap().remove("notes");
    answer
}

#[test]
fn repair_finishes_every_killed_run_of_a_folder_and_names_each() {
    let folder = tempfile::TempDir::new().unwrap();
    killed(folder.path(), "one", "500");
    killed(folder.path(), "two", "700");
    let output = command::output(&["summary"], folder.path());
    assert!(output.status.success(), "{}", stderr(&output));
    let traces = traces(folder.path());
    assert_eq!(traces.len(), 2);
    for trace in traces {
        assert!(ending(&trace).is_some_and(|text| text.starts_with("killed ")), "{}", trace.display());
        let line = format!("{}: its process was killed", trace.display());
        assert!(stderr(&output).contains(&line), "{}", stderr(&output));
        assert!(!journal(&trace).exists());
    }
}

/// Runs a program that kills itself under `memtrace run`, which sees the signal as its parent. The answer
/// must name the signal and no OOM kill, and must include the host samples that were only in the journal.
#[test]
fn run_names_the_signal_that_killed_a_program_and_its_samples_of_the_host_survive() {
    let folder = tempfile::TempDir::new().unwrap();
    let mut run = command::memtrace();
    run.args(["run", "-o"])
        .arg(folder.path())
        .arg("--")
        .arg(parts_program("recovered"))
        .args(["kill", "20000"]);
    let output = run.env("MEMTRACE_FLUSH_MS", "60000").output().unwrap();
    assert!(stderr(&output).contains("by SIGKILL, and not because memory ran out"), "{}", stderr(&output));
    let traces = traces(folder.path());
    let ending = ending(&traces[0]).unwrap();
    assert!(ending.starts_with("killed ") && ending.contains(" signal=9 "), "{ending}");
    let rows = fs::read_to_string(&traces[0]).unwrap();
    for source in ["proc_status", "meminfo", "smaps"] {
        assert!(rows.contains(&format!(",sample,0,{source},")), "{source}: {rows:.2000}");
    }
    let output = command::output(&["summary", "--json"], folder.path());
    let killed = &summary(&output)["processes"][0]["killed"];
    assert_eq!((&killed["by"], &killed["signal"]), (&"sent".into(), &9.into()), "{killed}");
}

#[test]
fn repair_ends_the_part_before_when_the_process_was_killed_between_two_parts() {
    let folder = tempfile::TempDir::new().unwrap();
    let traced =
        Traced::new(&parts_program("recovered"), &["kill", "3017"]).env("MEMTRACE_OUT", folder.path());
    assert_eq!(traced.env("MEMTRACE_ROTATE", "64k").run().status(), 128 + 9);
    // Sorts the parts by their numbers: NAME.csv is the first, then come NAME.part2.csv and so on.
    let mut parts = traces(folder.path());
    let number = |file: &PathBuf| RowReader::open(file).unwrap().meta().part;
    parts.sort_by_key(number);
    assert!(parts.len() > 2, "{parts:?}");
    // Cuts the end row of the part before the last, as if the process was killed while it changed parts: the
    // writer creates a new part with its checkpoint before it writes the end row of the old part.
    let old = &parts[parts.len() - 2];
    let whole = fs::read_to_string(old).unwrap();
    let without_end = &whole[..whole.trim_end().rfind('\n').unwrap() + 1];
    fs::write(old, &whole[..without_end.len() + 7]).unwrap();
    let check = command::output(&["check", "--repair"], folder.path());
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    // Compares all columns except the time: the repair takes the time of the row before, because no file says
    // when the new part began.
    let fields = |text: &str| -> Vec<String> {
        let last = text.lines().last().unwrap();
        last.split(',')
            .enumerate()
            .filter(|(index, _)| *index != 1)
            .map(|(_, field)| field.to_owned())
            .collect()
    };
    // A repaired end row must lack `formulas=0`, because the repair does not know all texts of the trace.
    let said = whole.replace(" formulas=0,", ",");
    assert_ne!(said, whole);
    assert_eq!(fields(&fs::read_to_string(old).unwrap()), fields(&said));
    // The last part is complete by now, so nothing is repaired. `check` must accept the missing end row of an
    // earlier part, but must report a gap if the row before it is missing, too.
    fs::write(old, without_end).unwrap();
    let check = command::output(&["check"], folder.path());
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    fs::write(old, &without_end[..without_end.trim_end().rfind('\n').unwrap() + 1]).unwrap();
    assert_eq!(command::output(&["check"], folder.path()).status.code(), Some(1));
}

#[test]
fn repair_by_six_commands_at_once_succeeds_for_all() {
    for round in 0..3 {
        let folder = tempfile::TempDir::new().unwrap();
        killed(folder.path(), "one", "9999");
        let start = || {
            let mut command = command::memtrace();
            command.args(["summary", "--json"]).arg(folder.path());
            let piped = std::process::Stdio::piped;
            command.stdout(piped()).stderr(piped()).spawn().unwrap()
        };
        let commands: Vec<_> = (0..6).map(|_| start()).collect();
        let answers: Vec<_> =
            commands.into_iter().map(|command| summary(&command.wait_with_output().unwrap())).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{round}: {answers:#?}");
        let check = command::output(&["check"], folder.path());
        assert!(check.status.success(), "{round}: {}", String::from_utf8_lossy(&check.stdout));
    }
}

#[test]
fn repair_of_a_trace_that_cannot_be_written_reads_the_journal_and_says_so() {
    for rotate in ["0", "64k"] {
        let folder = tempfile::TempDir::new().unwrap();
        let [out, temporary] = ["out", "temporary"].map(|name| folder.path().join(name));
        fs::create_dir(&temporary).unwrap();
        let traced = Traced::new(&parts_program("recovered"), &["kill", "3017"]).env("MEMTRACE_OUT", &out);
        let ran = traced.env("MEMTRACE_ROTATE", rotate).env("MEMTRACE_STACKS", "ops").run();
        assert_eq!(ran.status(), 128 + 9, "{}", ran.stderr());
        let before: Vec<_> = traces(&out).iter().map(|file| fs::read(file).unwrap()).collect();
        // A read-only mount, which even root cannot write to.
        let shown = out.display();
        let mount =
            format!("mount --bind {shown} {shown} && mount -o remount,ro,bind {shown} && exec \"$@\"");
        let in_mount = |words: &[&str]| {
            let mut command = untraced(Path::new("unshare"), &["--map-root-user", "--mount", "sh", "-c"]);
            command.arg(&mount).arg("sh").arg(env!("CARGO_BIN_EXE_memtrace")).args(words);
            command.arg(&out).env("TMPDIR", &temporary).output().unwrap()
        };
        let text = in_mount(&["summary"]);
        let notes = String::from_utf8_lossy(&text.stdout).replace('\n', " ");
        assert!(
            notes.contains("its process was killed, and it cannot be written now"),
            "{notes}{}",
            stderr(&text)
        );
        let read_only = summary(&in_mount(&["summary", "--json"]));
        let check = in_mount(&["check", "--repair"]);
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
        let after: Vec<_> = traces(&out).iter().map(|file| fs::read(file).unwrap()).collect();
        assert!(before == after, "nothing was written");
        // The temporary folder must be empty. It belongs to these commands alone, because other tests repair
        // traces at the same time.
        let left: Vec<_> = fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");

        let written = summary(&command::output(&["summary", "--json"], &out));
        assert!(command::output(&["check"], &out).status.success());
        assert_eq!(read_only, written, "{rotate}");
    }
}

#[test]
fn repair_of_a_trace_that_a_full_disk_cut_counts_the_events_that_came_later() {
    for buffer in ["16m", "1m"] {
        let folder = tempfile::TempDir::new().unwrap();
        let (out, kept) = (folder.path().join("out"), folder.path().join("kept"));
        fs::create_dir_all(&out).unwrap();
        fs::create_dir_all(&kept).unwrap();
        compiled("fakes/cudart.c", RUNTIME, &[]);
        let flood = compiled("threads/flood.c", "flood_a_disk", &[RUNTIME]);
        let script = "mount -t tmpfs -o size=300k none \"$OUT\" && \
                  LD_PRELOAD=\"$TRACER\" MEMTRACE_OUT=\"$OUT\" \"$FLOOD\" 4 20000 && \
                  mount -o remount,size=200m \"$OUT\" && \
                  \"$MEMTRACE\" check --repair \"$OUT\" >&2; \
                  cp \"$OUT\"/*.csv \"$KEPT\"";
        let mut command = untraced(Path::new("unshare"), &["--map-root-user", "--mount", "sh", "-c", script]);
        command.env("OUT", &out).env("KEPT", &kept).env("FLOOD", &flood);
        command.env("MEMTRACE_BUFFER", buffer).env("TRACER", common::library("libmemtrace.so"));
        let output = command.env("MEMTRACE", env!("CARGO_BIN_EXE_memtrace")).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let calls: i64 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
        assert_eq!(calls, 4 * 20_000 * 2);
        let trace = Trace::read_lossy(&traces(&kept)[0]);
        assert!(trace.end.starts_with("stopped "), "{}: {}", trace.end, stderr(&output));
        let recorded = trace.of(EventName::ExtAlloc).len() + trace.of(EventName::ExtFree).len();
        // If a free was lost, it gets a row when its address is allocated again (`missed_frees`).
        let of_calls = recorded as i64 - trace.end_count("missed_frees");
        assert_eq!(of_calls + trace.end_count("lost"), calls, "{}", trace.end);
        // With a buffer of 1 MiB, events must be lost. A buffer of 16 MiB holds all events, so only events
        // after the writer's failed write can be lost, and possibly none.
        assert!(trace.end_count("lost") > 0 || buffer == "16m", "{}", trace.end);
    }
}

/// The message must not say that the program allocated no memory.
#[test]
fn run_on_a_full_disk_says_that_the_trace_could_not_be_written() {
    let folder = tempfile::TempDir::new().unwrap();
    let out = folder.path().join("out");
    fs::create_dir_all(&out).unwrap();
    compiled("fakes/cudart.c", RUNTIME, &[]);
    let flood = compiled("threads/flood.c", "flood_a_full_disk", &[RUNTIME]);
    let script = "mount -t tmpfs -o size=4k none \"$OUT\" && head -c 4096 /dev/zero >\"$OUT/other\" && \
                  exec \"$MEMTRACE\" run --out \"$OUT\" -- \"$FLOOD\" 1 100";
    let mut command = untraced(Path::new("unshare"), &["--map-root-user", "--mount", "sh", "-c", script]);
    command.env("OUT", &out).env("FLOOD", &flood).env("MEMTRACE", env!("CARGO_BIN_EXE_memtrace"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "200");
    let told = stderr(&output);
    assert!(told.contains("No space left") && told.contains("no trace: it could not be written"), "{told}");
    assert!(!told.contains("allocated no GPU memory"), "{told}");
}

#[test]
fn repair_finishes_a_trace_that_was_moved_before_another_program_was_traced() {
    let folder = tempfile::TempDir::new().unwrap();
    let [out, moved] = ["memtrace-out", "crash1"].map(|name| folder.path().join(name));
    fs::create_dir(&out).unwrap();
    let taken = killed(&out, "one", "500");
    fs::rename(&out, &moved).unwrap();
    // The recorder of this program removes orphaned journals.
    let other = Traced::new(&parts_program("recovered"), &["exit", "10"]).env("MEMTRACE_OUT", &out);
    assert_eq!(other.run().status(), 0);
    let output = command::output(&["summary", "--json"], &moved);
    assert!(output.status.success(), "{}", stderr(&output));
    let [trace] = &traces(&moved)[..] else { panic!("one trace") };
    let is_whole = |text: String| text.starts_with("killed ") && text.contains(" lost=0 ");
    assert!(ending(trace).is_some_and(is_whole), "{:?}", ending(trace));
    let is_allocation =
        |event| matches!(event, EventName::Alloc | EventName::ExtAlloc | EventName::HostAlloc);
    assert_eq!(Trace::read(trace).rows.iter().filter(|row| is_allocation(row.event)).count() as i64, taken);
    let _ = fs::remove_file(journal(trace).with_extension("names"));
    let _ = fs::remove_file(journal(trace));
}

#[test]
fn doctor_lists_the_journal_of_a_killed_process_and_removes_those_without_a_trace() {
    let folder = tempfile::TempDir::new().unwrap();
    killed(folder.path(), "one", "500");
    let trace = traces(folder.path()).remove(0);
    let journal = journal(&trace);
    // The journal of a process that was killed before its trace had a name. No process has the id in the
    // name.
    let nameless = PathBuf::from(format!("/dev/shm/memtrace-{}-{}.journal", 1 << 23, std::process::id()));
    fs::write(&nameless, [0; 4096]).unwrap();
    let age = |path: &Path| {
        let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 3600);
        fs::File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    };
    age(&nameless);
    let findings = || -> Vec<Value> {
        let output = command::output(&["doctor", "--json", "--"], Path::new("/bin/false"));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["findings"].as_array().unwrap().clone()
    };
    let is_listed = || {
        let of_trace = |line: &Value| {
            line["what"] == "journals"
                && line["says"].as_str().unwrap().contains(&*journal.to_string_lossy())
                && line["todo"].as_str().unwrap().contains(&*trace.to_string_lossy())
        };
        findings().iter().any(of_trace)
    };
    assert!(is_listed());
    assert!(!nameless.exists() && journal.exists());
    // The trace is gone. It may have been moved, so doctor must keep its journal, but not for long.
    fs::remove_file(&trace).unwrap();
    assert!(is_listed() && journal.exists());
    age(&journal);
    assert!(!is_listed());
    assert!(!journal.exists() && !journal.with_extension("names").exists());
}

#[test]
fn a_process_that_may_start_no_thread_leaves_neither_a_trace_nor_a_journal() {
    let shim = compiled("other_tools/no_threads.c", "libno_threads.so", &[]);
    let preload = format!("{}:{}", common::library("libmemtrace.so").display(), shim.display());
    let hello = tempfile::NamedTempFile::new().unwrap();
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let traced = Traced::new(&parts_program("recovered"), &["exit", "500"]).env("LD_PRELOAD", preload);
    let ran = traced.env("MEMTRACE_HELLO", hello.path()).env("MEMTRACE_OUT", &out).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert_eq!(ran.stderr().lines().count(), 1, "{}", ran.stderr());
    assert!(ran.stderr().starts_with("memtrace: not tracing: cannot start a thread"), "{}", ran.stderr());
    // The tracer reports to `memtrace run` that the trace could not be written. `check` must not mistake the
    // process for a killed one.
    assert!(fs::read(hello.path()).unwrap().contains(&memtrace_trace::hello::TRACE_FAILED));
    let output = command::output(&["check"], &out);
    assert!(!stderr(&output).contains("killed") && !out.exists(), "{}", stderr(&output));
}
