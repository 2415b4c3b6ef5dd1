//! Hooks of libc: `dlsym`, `exec`, and the functions that end a process.

mod dlsym;
pub(crate) mod exec;
pub(crate) mod exit;
mod foreign_program;
