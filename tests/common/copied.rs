//! Copies of programs, to be run.

use std::path::Path;
use std::process::Command;

/// Copies a program by `cp`. A copy that this process writes may still be open for writing in a child that another
/// test has just forked, and the system refuses to run it then ("Text file busy").
pub(crate) fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("--").args([from, to]).status().unwrap().success());
}
