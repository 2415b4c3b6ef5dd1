//! The command `memtrace`: runs a program under the tracer, and answers questions about its trace.
//!
//! Exit status:
//!
//! | status | meaning |
//! | --- | --- |
//! | 0 | success |
//! | 1 | `check` found a problem, `doctor` found that tracing would not work, or `fit` has no answer |
//! | 2 | the request is invalid, or the trace cannot be read |
//! | 3 | a limit was exceeded (`budget`, `diff --fail-over`), or no value fits (`fit`) |
//! | the program's own | `run`: its exit status, or 128 plus its signal |
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
    match commands::run(&commands::command().get_matches()) {
        Ok(code) => code,
        // The reader closed the pipe, which is no error: `memtrace peak out | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("memtrace: {}", message(&error));
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

/// The error and its causes in one line. Some errors print their cause themselves: it is not repeated.
fn message(error: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.ends_with(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_message_names_each_cause_once() {
        let cause = std::io::Error::other("the disk is full");
        let path = "out.csv".into();
        let error: anyhow::Error = memtrace_trace::Error::Io { path, source: cause }.into();
        assert_eq!(message(&error), "out.csv: the disk is full");
        let error = Err::<(), _>(error).context("cannot write").unwrap_err();
        assert_eq!(message(&error), "cannot write: out.csv: the disk is full");
    }
}
