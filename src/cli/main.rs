//! The command `memtrace`: launches a traced program, and answers questions about its trace.
//!
//! Exit status: 0; 1 when `check` found a problem, or `doctor` that tracing would not work; 2 for a request that makes no sense or a trace
//! that cannot be read; 3 when a limit was broken, or nothing fits; of `run`, the program's own.
#![forbid(unsafe_code)]

mod args;
mod child_env;
mod commands;
mod load_failure;
mod out_folder;
mod recovery;
mod signals;
mod terminal;
mod trace_input;

use std::process::ExitCode;

fn main() -> ExitCode {
    let result = commands::run(&commands::command().get_matches());
    match result {
        Ok(code) => code,
        // The reader has seen enough: `memtrace peak out | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("memtrace: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
