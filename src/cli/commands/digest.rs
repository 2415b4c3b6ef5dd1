//! `memtrace digest`: a small Parquet file of each process, from which a whole job is answered.

use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgMatches, Command};
use memtrace_analysis::exports::DIGEST;
use memtrace_analysis::exports::digest::{ColumnType, DigestColumn};

use super::export;
use crate::args;

/// The arguments of `memtrace digest`.
pub(crate) fn command() -> Command {
    Command::new(DIGEST.name())
        .about(DIGEST.about())
        .after_long_help(format!("Columns:\n{}", columns()))
        .arg(args::trace_arg("TRACE"))
        .args(export::shared_args(
            "Write to this file, or to this folder under the names of the traces [default: the current folder]",
        ))
}

/// The columns of a digest, a line each.
fn columns() -> String {
    let width = DigestColumn::ALL.iter().map(|(_, name, ..)| name.len()).max().unwrap_or(0);
    let line = |(_, name, kind, about): &(DigestColumn, &str, ColumnType, &str)| {
        let kind = match kind {
            ColumnType::Int => "integer",
            ColumnType::Float => "double",
            ColumnType::Text => "text",
        };
        format!("  {name:width$}  {kind:7} {}\n", about.trim())
    };
    DigestColumn::ALL.iter().map(line).collect()
}

/// Writes the digests.
///
/// # Errors
/// When an option is invalid, a trace cannot be read, or a digest cannot be written.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    export::write(DIGEST, DIGEST.name(), matches)
}
