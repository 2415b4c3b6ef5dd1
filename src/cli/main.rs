//! The command `memtrace`: runs a program under the tracer, and answers questions about its trace.
//!
//! Exit status; docs/guide.md lists every case:
//!
//! | status | meaning |
//! | --- | --- |
//! | 0 | success |
//! | 1 | `check` or `doctor` found a problem, or `fit` or `tune` has no answer |
//! | 2 | the request is invalid, or the trace cannot be read |
//! | 3 | a limit was exceeded, or nothing fits |
//! | the program's own | `run`: its exit status, or 128 plus its signal |
#![deny(unsafe_code)]

mod allocator;
mod args;
mod child_env;
mod cluster;
mod commands;
mod error_message;
mod grace_period;
mod libraries;
mod load_failure;
mod out_folder;
mod recovery;
mod search_path;
mod signals;
mod terminal;
mod trace_input;

use std::process::ExitCode;

use error_message::message;

#[global_allocator]
static ALLOCATOR: allocator::EndsWhenFull = allocator::EndsWhenFull;

fn main() -> ExitCode {
    let result = match is_called("nvidia-smi") {
        true => commands::nvidia_smi::answer(
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()),
        ),
        false => match commands::command().try_get_matches() {
            Ok(matches) => signals::keep_status_of_children().and_then(|()| commands::run(&matches)),
            Err(error) => match named_trace(&error) {
                Some(path) => Err(anyhow::anyhow!(
                    "{path} is a path, not a command; show its trace with: memtrace summary {path}"
                )),
                // If the text does not begin with `error: `, it is a help page or the version, which `exit`
                // prints.
                None => match error.render().to_string().strip_prefix("error: ") {
                    Some(text) => Err(anyhow::anyhow!("{}", text.trim_end())),
                    None => error.exit(),
                },
            },
        },
    };
    recovery::remove_temporary_files();
    match result {
        Ok(code) => code,
        // A closed pipe is no error: in `memtrace peak out | head`, the reader ends first.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            terminal::say(&message(&error));
            ExitCode::from(2)
        }
    }
}

/// Returns true if this command was called as `name`. `memtrace run --phantom` puts a link called
/// `nvidia-smi` into the program's `PATH`.
fn is_called(name: &str) -> bool {
    let called = std::env::args_os().next().map(std::path::PathBuf::from);
    called.is_some_and(|path| path.file_name().is_some_and(|file| file == name))
}

/// Returns the word that the user gave instead of a command if it is an existing path. Returns `None` if
/// `error` has another cause.
fn named_trace(error: &clap::Error) -> Option<String> {
    if error.kind() != clap::error::ErrorKind::InvalidSubcommand {
        return None;
    }
    let word = std::env::args_os().nth(1)?;
    std::path::Path::new(&word).exists().then(|| word.to_string_lossy().into_owned())
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
