//! `scripts/test-again`, with a `cargo` that knows one test that passes: which failures get a second run, and
//! what then counts as passed.

use std::fs;
use std::process::Command;

/// Whether the script succeeds on a log, and the arguments of each call of cargo.
fn run_again(log: &str) -> (bool, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let (log_file, calls) = (folder.path().join("log"), folder.path().join("calls"));
    fs::write(&log_file, log).unwrap();
    let root = env!("CARGO_MANIFEST_DIR");
    let path = format!("{root}/tests/scripts/again:{}", std::env::var("PATH").unwrap());
    let mut script = Command::new(format!("{root}/scripts/test-again"));
    let output = script.arg(&log_file).env("PATH", path).env("CALLS", &calls).output().unwrap();
    let calls = fs::read_to_string(&calls).unwrap_or_default();
    (output.status.success(), calls.lines().map(str::to_owned).collect())
}

/// What cargo prints for a binary with failed tests.
fn failures(binary: &str, names: &[&str]) -> String {
    let outputs: String = names.iter().map(|name| format!("---- {name} stdout ----\n    a line\n")).collect();
    let list: String = names.iter().map(|name| format!("    {name}\n")).collect();
    format!(
        "failures:\n\n{outputs}\nfailures:\n{list}\ntest result: FAILED. 9 passed; 1 failed\n\n\
         error: test failed, to rerun pass `{binary}`\n"
    )
}

#[test]
fn an_unstable_test_runs_again_alone_and_counts_as_passed() {
    let log =
        failures("-p memtrace-machine --lib", &["files::steady"]) + &failures("--test cli", &["steady"]);
    let (passed, calls) = run_again(&log);
    assert!(passed);
    let first = "test --release -p memtrace-machine --lib -- --exact files::steady";
    assert_eq!(calls, [first, "test --release --test cli -- --exact steady"]);
}

#[test]
fn a_test_that_fails_again_fails_and_a_name_that_matches_none_too() {
    for name in ["broken", "missing"] {
        let (passed, calls) = run_again(&failures("--test cli", &["steady", name]));
        assert_eq!((passed, calls.len()), (false, 2), "{name}");
    }
}

#[test]
fn many_failures_and_failures_without_a_name_get_no_second_run() {
    let many = failures("--test cli", &["a_steady", "b_steady", "c_steady", "d_steady"]);
    let killed = "error: test failed, to rerun pass `--test cli`\n";
    let one_and_killed = failures("--test page", &["steady"]) + killed;
    for log in [many.as_str(), killed, &one_and_killed, "error: could not compile `memtrace`\n", ""] {
        assert_eq!(run_again(log), (false, Vec::new()), "{log}");
    }
}
