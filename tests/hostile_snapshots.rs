//! Hostile memory snapshots: no kind of them executes anything, crashes the command, or takes more than 256 MiB
//! of memory or 10 s of CPU time.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Output;

use tempfile::TempDir;

use crate::common::command::clean;
use crate::common::pickles::{Kind, broken, readable};

/// The memory that a command may write to, in KiB: its data and the stacks of its threads.
const MOST_KIB: u64 = 256 << 10;
/// The address space that a command may use, in KiB, which also has the program itself and unused addresses.
const MOST_ADDRESSES_KIB: u64 = 768 << 10;
/// The CPU time that a command may take, in seconds.
const MOST_SECONDS: u64 = 10;
/// The fewest kinds that this file must try.
const FEWEST_KINDS: usize = 60;

/// Runs `memtrace ARGUMENTS FILE` within the limits.
fn memtrace(arguments: &[&str], file: &Path) -> Output {
    let script = format!(
        "ulimit -d {MOST_KIB}; ulimit -v {MOST_ADDRESSES_KIB}; ulimit -t {MOST_SECONDS}; ulimit -c 0; exec \"$0\" \"$@\""
    );
    let mut command = clean(Path::new("sh"));
    command.args(["-c", &script, env!("CARGO_BIN_EXE_memtrace")]).args(arguments).arg(file);
    command.env("RUST_BACKTRACE", "0").output().unwrap()
}

/// Returns the texts of both streams. Fails if the command was killed, panicked, or printed a control character.
fn ended(kind: &str, output: &Output) -> (String, String) {
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8(text.clone()).unwrap());
    let [out, err] = texts;
    assert_eq!(output.status.signal(), None, "{kind}: {err}");
    assert!(output.status.code().is_some_and(|code| code < 4), "{kind}: {:?} {err}", output.status);
    assert!(!err.contains("panicked"), "{kind}: {err}");
    let is_control =
        |char: char| char.is_control() && char != '\n' || ('\u{202A}'..='\u{202E}').contains(&char);
    assert!(!out.contains(is_control) && !err.contains(is_control), "{kind}: {out:?} {err:?}");
    (out, err)
}

#[test]
fn a_hostile_snapshot_is_refused_in_one_line_with_little_memory_and_runs_nothing() {
    let folder = TempDir::new().unwrap();
    let (proof, file) = (folder.path().join("executed"), folder.path().join("hostile.pickle"));
    let kinds = broken(proof.to_str().unwrap());
    let mut names: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    names.sort_unstable();
    names.dedup();
    assert!(names.len() >= FEWEST_KINDS, "{}", names.len());
    println!("{} kinds", names.len());
    for Kind { name, bytes } in &kinds {
        fs::write(&file, bytes).unwrap();
        let output = memtrace(&["summary"], &file);
        let (_, err) = ended(name, &output);
        assert_eq!(output.status.code(), Some(2), "{name}: {err}");
        assert_eq!(err.lines().count(), 1, "{name}: {err}");
        assert!(err.contains("not a memory snapshot"), "{name}: {err}");
        assert!(!proof.exists(), "{name}");
    }
}

/// These files have the form of a snapshot. Their answers may be senseless, but every command must end.
#[test]
fn a_hostile_snapshot_that_can_be_read_ends_every_report_with_little_memory() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("hostile.pickle");
    let page = folder.path().join("page.html");
    let commands: [&[&str]; 9] = [
        &["summary"],
        &["peak", "--by", "module"],
        &["peak", "--by", "category", "--json"],
        &["oom"],
        &["leaks"],
        &["frag", "--at", "end"],
        &["check"],
        &["advise"],
        &["report", "-o", page.to_str().unwrap()],
    ];
    let kinds = readable();
    println!("{} kinds", kinds.len());
    for Kind { name, bytes } in &kinds {
        fs::write(&file, bytes).unwrap();
        for command in commands {
            let about = format!("{name}, {}", command[0]);
            let (_, err) = ended(&about, &memtrace(command, &file));
            assert!(!err.contains("not a memory snapshot"), "{about}: {err}");
        }
    }
}
