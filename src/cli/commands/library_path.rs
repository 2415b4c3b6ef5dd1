//! `memtrace lib`: prints the path of a library, for `LD_PRELOAD`.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::libraries::{PHANTOM, TRACER, library};
use crate::terminal;

/// Returns the definition of the command `memtrace lib`.
pub(crate) fn command() -> Command {
    Command::new("lib")
        .about("Print the path of the library, for LD_PRELOAD=$(memtrace lib)")
        .arg(
            Arg::new("phantom")
                .long("phantom")
                .action(ArgAction::SetTrue)
                .help("Print the path of the library that simulates a GPU, the second one in LD_PRELOAD"),
        )
        .after_help(
            "Examples:\n  memtrace lib  the library that traces: LD_PRELOAD=$(memtrace lib) python train.py\n\n\
             On a simulated GPU:\n  export MEMTRACE_PHANTOM=h100-80g\n  LD_PRELOAD=$(memtrace lib):$(memtrace lib --phantom) python train.py",
        )
}

/// Prints the path.
///
/// # Errors
/// When the library is not found.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let path = library(if matches.get_flag("phantom") { PHANTOM } else { TRACER })?;
    let bytes = path.as_os_str().as_bytes();
    if bytes.iter().any(|byte| matches!(byte, b' ' | b':')) {
        terminal::say(
            "LD_PRELOAD cannot name this path, because it has a space or a colon; use memtrace run, or install \
             memtrace in another folder",
        );
    }
    // Prints the bytes of the path unchanged, because a shell passes them on.
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.write_all(b"\n")?;
    Ok(ExitCode::SUCCESS)
}
