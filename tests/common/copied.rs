//! Copies a program into a folder where a test can run it.

use std::path::Path;
use std::process::Command;

/// Copies a program with `cp`. If this process wrote the copy, a child that another test has just forked
/// might still hold it open for writing, and the system would refuse to run it ("Text file busy").
pub(crate) fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("--").args([from, to]).status().unwrap().success());
}
