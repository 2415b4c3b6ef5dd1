//! Kills traced programs with `scripts/kill-rounds`: each event must be in the trace or counted as lost.

use std::path::Path;
use std::process::Command;

use crate::common::library;
use crate::common::torch::Torch;

/// Runs `scripts/kill-rounds` with this build and these arguments. Every round must succeed.
fn kill_rounds(arguments: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let build = Path::new(env!("CARGO_BIN_EXE_memtrace")).parent().unwrap();
    let mut command = Command::new(root.join("scripts/kill-rounds"));
    command.arg("--build").arg(build).arg("--library").arg(library("libmemtrace.so"));
    let output = command.args(arguments).output().expect("Python 3 is there");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(" 0 exceptions"), "{text}");
}

#[test]
fn sigkill_loses_no_event_that_is_not_counted() {
    kill_rounds(&["--rounds", "12", "--overload", "0", "--seed", "1"]);
}

#[test]
fn sigkill_under_overload_loses_no_event_that_is_not_counted() {
    kill_rounds(&["--rounds", "8", "--overload", "1", "--seed", "2"]);
}

/// The oldest parts of the trace are removed, and the others are compressed.
#[test]
fn killed_loops_with_a_schedule_and_compression_replay_as_torch() {
    Torch::run("2.11.0", |_| kill_rounds(&["--torch", "2.11.0", "--rounds", "4", "--seed", "3"]));
}
