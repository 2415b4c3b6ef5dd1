//! `memtrace completions` and `memtrace man`: the command line for a shell, and as manual pages.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::Shell;

/// The arguments of `memtrace completions`.
pub(crate) fn completions_command() -> Command {
    Command::new("completions")
        .about("Print the completions of commands and options for a shell")
        .after_help("bash: memtrace completions bash > ~/.local/share/bash-completion/completions/memtrace")
        .arg(Arg::new("shell").value_name("SHELL").required(true).value_parser(value_parser!(Shell)))
}

/// The arguments of `memtrace man`.
pub(crate) fn man_command() -> Command {
    Command::new("man")
        .about("Print the manual page, or write those of all commands to a folder")
        .after_help("For man memtrace-peak: memtrace man ~/.local/share/man/man1")
        .arg(
            Arg::new("folder")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("Write a page for each command to this folder [default: print that of memtrace]"),
        )
}

/// Prints the completions.
///
/// # Errors
/// When stdout is closed.
pub(crate) fn completions(matches: &ArgMatches) -> Result<ExitCode> {
    if let Some(shell) = matches.get_one::<Shell>("shell") {
        let mut text = Vec::new();
        clap_complete::generate(*shell, &mut super::command(), "memtrace", &mut text);
        std::io::stdout().write_all(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints or writes the manual pages.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn man(matches: &ArgMatches) -> Result<ExitCode> {
    let Some(folder) = matches.get_one::<PathBuf>("folder") else {
        let mut page = Vec::new();
        clap_mangen::Man::new(super::command()).render(&mut page)?;
        std::io::stdout().write_all(&page)?;
        return Ok(ExitCode::SUCCESS);
    };
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        clap_mangen::generate_to(super::command(), folder)
    };
    write().with_context(|| format!("cannot write the pages to {}", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
