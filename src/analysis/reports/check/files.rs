//! `memtrace check --files`: the files of a run, for a program that reads the rows itself.

use memtrace_trace::columns::{COLUMNS, ColumnType};
use memtrace_trace::config::Compression;
use memtrace_trace::files::compression;
use memtrace_trace::text::printable;
use memtrace_trace::{Row, end_row};
use serde_json::{Value, json};

use super::super::report::{Answer, Report};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;

/// `memtrace check --files`.
pub(super) struct CheckFiles;

/// The option that selects this report.
pub(super) const FILES: Flag = Flag::switch(
    "files",
    "List the files by rank and part, for programs that read the rows themselves; completes the files of killed \
     processes first",
);

impl Report for CheckFiles {
    fn name(&self) -> &'static str {
        "check --files"
    }

    fn about(&self) -> &'static str {
        "List the files of a run by rank and part"
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut files = Vec::new();
        let mut printer = options.printer();
        for trace in &input.traces {
            let formulas = formulas(trace);
            for (index, part) in trace.parts().enumerate() {
                // If a trace's folder is not writable, memtrace writes the completed rest of the trace to a
                // temporary folder, which the command removes when it ends. Such a file is not listed.
                if part.path.parent() != trace.path.parent() {
                    continue;
                }
                // Each part begins with rows for the blocks that are live at its start. In a later part, a
                // reader must skip these rows and the meta row, because they repeat the part before.
                let repeated = if index == 0 { 0 } else { part.meta.opening_rows.saturating_add(1) };
                let path = part.path.display().to_string();
                printer.plain(printable(&path));
                files.push(json!({
                    "file": path,
                    "rank": part.meta.rank,
                    "part": part.meta.part.max(1),
                    "repeated_rows": repeated,
                    "brief": part.meta.brief,
                    "formulas": formulas,
                }));
            }
        }
        let json = json!({ "files": files, "columns": columns()? });
        Ok(Answer { is_list: true, ..Answer::new(printer, json, Footer::of([input])) })
    }
}

/// Returns the number of texts in the trace that start with an added quote, because a spreadsheet would read
/// them as formulas. The count comes from the end row. Returns `None` for a compressed trace, because finding
/// the end row there costs as much as reading the whole trace, and if the end row lacks the count.
fn formulas(trace: &TraceFile) -> Option<u64> {
    let last = trace.files().last()?.file_name()?.to_str()?;
    if compression(last) != Compression::Off {
        return None;
    }
    end_row::formulas(&trace.ending()?)
}

/// Returns the columns of this version with their types and defaults. If an older file lacks a column, the
/// default applies.
fn columns() -> Result<Value> {
    let defaults = serde_json::to_value(Row::default()).map_err(|error| Error::usage(error.to_string()))?;
    let columns = COLUMNS.iter().map(|column| {
        let kind = if column.kind == ColumnType::Int { "integer" } else { "text" };
        json!({ "name": column.name, "type": kind, "default": defaults[column.name] })
    });
    Ok(columns.collect())
}
