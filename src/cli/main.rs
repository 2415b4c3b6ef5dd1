//! The command `memtrace`.
fn main() {}
