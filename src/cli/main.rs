//! The command `memtrace`: launches a traced program, and answers questions about its trace.
//!
//! Exit status: 0; 1 when `check` found a problem, or `doctor` that tracing would not work; 2 for a request that makes no sense or a trace
//! that cannot be read; 3 when a limit was broken, or nothing fits; of `run`, the program's own.
#![forbid(unsafe_code)]

mod args;
mod doctor;
mod export;
mod fit;
mod fit_page;
mod help;
mod html;
mod launch;
mod leftover;
mod live;
mod report;
mod search;
mod signals;
mod terminal;
mod traced;

use std::process::ExitCode;

fn main() -> ExitCode {
    let matches = args::command().get_matches();
    let result = match matches.subcommand() {
        Some(("run", matches)) => launch::run(matches),
        Some(("fit", matches)) => fit::run(matches),
        Some(("doctor", matches)) => doctor::run(matches),
        Some(("export", matches)) => export::run(matches),
        Some(("report", matches)) => html::run(matches),
        Some(("live", matches)) => live::run(matches),
        Some(("help", matches)) => help::run(matches),
        Some((name, matches)) => report::run(name, matches),
        None => unreachable!("a subcommand is required"),
    };
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
