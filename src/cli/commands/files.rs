//! `memtrace files`: the files of a run, for a program that reads the rows itself.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command, value_parser};
use memtrace_analysis::read::stream::TraceFile;
use memtrace_trace::columns::{COLUMNS, ColumnType};
use memtrace_trace::config::Compression;
use memtrace_trace::files::compression;
use memtrace_trace::text::printable;
use memtrace_trace::{Row, end_row};
use serde_json::{Value, json};

use crate::{args, recovery, terminal, trace_input};

/// The arguments of `memtrace files`.
pub(crate) fn command() -> Command {
    Command::new("files")
        .about("List the files of a run by rank and part; first completes those of killed processes")
        .arg(args::trace_arg("TRACE"))
        .arg(args::json_arg())
        .arg(
            Arg::new("rank")
                .long("rank")
                .value_name("RANK")
                .help("Only this rank")
                .value_parser(value_parser!(i32))
                .allow_negative_numbers(true),
        )
}

/// Lists the files.
///
/// # Errors
/// When there is no trace, or it cannot be read.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let input = trace_input::open_arg("TRACE", matches, true)?;
    let mut files = Vec::new();
    for trace in &input.traces {
        let formulas = formulas(trace);
        for (index, part) in trace.parts().enumerate() {
            // The rest of a trace that cannot be written: it is removed when this command ends.
            if recovery::is_temporary(&part.path) {
                continue;
            }
            // The first part that exists has the blocks that are live at its start; a later one repeats them.
            let repeated = if index == 0 { 0 } else { part.meta.opening_rows.saturating_add(1) };
            files.push(json!({
                "file": part.path.display().to_string(),
                "rank": part.meta.rank,
                "part": part.meta.part.max(1),
                "repeated_rows": repeated,
                "repeats": part.meta.repeats,
                "formulas": formulas,
            }));
        }
    }
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        let answer = json!({ "files": files, "columns": columns()?, "notes": input.notes });
        stdout.write_all(terminal::json_text(&answer).as_bytes())?;
    } else {
        for note in &input.notes {
            terminal::say(note);
        }
        for file in &files {
            writeln!(stdout, "{}", printable(file["file"].as_str().unwrap_or_default()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The number of texts in a trace that have a quote before them, as its end row says. To find that row in a compressed
/// part would cost as much as to read all of it, so this is `None` then.
fn formulas(trace: &TraceFile) -> Option<u64> {
    let last = trace.files().last()?.file_name()?.to_str()?;
    if compression(last) != Compression::Off {
        return None;
    }
    end_row::formulas(&trace.ending()?)
}

/// The columns of this version with their types, and the values of those that an older file lacks.
fn columns() -> Result<Value> {
    let defaults = serde_json::to_value(Row::default())?;
    let columns = COLUMNS.iter().map(|column| {
        let kind = if column.kind == ColumnType::Int { "integer" } else { "text" };
        json!({ "name": column.name, "type": kind, "default": defaults[column.name] })
    });
    Ok(columns.collect())
}
