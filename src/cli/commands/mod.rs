//! The commands, a file or folder for each: its arguments, and the function that runs it. All reports share
//! one file.

use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgMatches, Command};
use memtrace_analysis::reports::REPORTS;

mod doctor;
mod explain;
mod export;
mod fit;
mod help;
mod lib;
mod live;
pub(crate) mod nvidia_smi;
mod page;
mod process_request;
mod reports;
mod run;
mod search_request;
mod shell;
mod terms;
mod tune;

/// The command line of `memtrace`, with all its commands.
pub(crate) fn command() -> Command {
    Command::new("memtrace")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Trace the GPU memory of a PyTorch program, with no change to the script")
        .after_help("Start with:  memtrace run -- python train.py")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .infer_subcommands(true)
        .subcommand(run::command())
        .subcommand(fit::command())
        .subcommands(REPORTS.iter().map(|report| reports::command(*report)))
        .subcommand(tune::command())
        .subcommand(export::command())
        .subcommand(live::command())
        .subcommand(nvidia_smi::command())
        .subcommand(page::command())
        .subcommand(lib::command())
        .subcommand(doctor::command())
        .subcommand(explain::command())
        .subcommand(shell::completions_command())
        .subcommand(shell::man_command())
        .subcommand(help::command())
}

/// Runs the command that the user typed.
///
/// # Errors
/// When the request is invalid, or a trace cannot be read.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    match matches.subcommand() {
        Some(("run", matches)) => run::run(matches),
        Some(("fit", matches)) => fit::run(matches),
        Some(("tune", matches)) => tune::run(matches),
        Some(("lib", matches)) => lib::run(matches),
        Some(("doctor", matches)) => doctor::run(matches),
        Some(("export", matches)) => export::run(matches),
        Some(("report", matches)) => page::run(matches),
        Some(("live", matches)) => live::run(matches),
        Some(("explain", matches)) => explain::run(matches),
        Some(("completions", matches)) => shell::completions(matches),
        Some(("man", matches)) => shell::man(matches),
        Some(("nvidia-smi", matches)) => nvidia_smi::run(matches),
        Some(("help", matches)) => help::run(matches),
        Some((name, matches)) => reports::run(name, matches),
        None => unreachable!("clap requires a subcommand"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
