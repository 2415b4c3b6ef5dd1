//! Functions of libc: look-ups, `exec`, and the ways out of a process.

mod dlsym;
pub(crate) mod exec;
pub(crate) mod exit;
mod foreign_program;
