//! Completes the traces of killed processes from their journals, before a command reads them.

use std::path::Path;

use anyhow::{Context, Result};
use memtrace_analysis::read::input::Input;
use memtrace_recover::{Repaired, repair, sweep};
use memtrace_trace::Meta;
use memtrace_trace::counts::counted;
use memtrace_trace::journal::folders;

use crate::terminal;

/// Completes the traces of `input` whose processes were killed, and reports each on stderr. True when a trace
/// changed, so that it must be opened again.
///
/// # Errors
/// When a journal cannot be read, or its rows cannot be written.
pub(crate) fn recover(input: &Input) -> Result<bool> {
    recover_each(input, |line| terminal::say(&line))
}

/// Same as [`recover`], without a message: for programs that are expected to be killed.
///
/// # Errors
/// Same as [`recover`].
pub(crate) fn recover_quietly(input: &Input) -> Result<bool> {
    recover_each(input, |_| {})
}

/// Why a trace without an end row cannot be finished here. A copy of a complete trace may be cut, too, so the
/// process need not have been killed.
fn without_journal(meta: &Meta) -> String {
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if meta.host.is_empty() || meta.host == here {
        return "no end row and no journal: its process was killed, or the file is an incomplete copy; the last \
                rows are missing"
            .to_owned();
    }
    format!(
        "no end row: it was copied from {} before its end, or its process was killed there; memtrace check \
         --repair on that host finishes it from its journal",
        meta.host
    )
}

/// Gives the traces at `path` whose processes were killed before the first row their meta row, from their journals.
/// Before [`Input::open`], which leaves out empty files.
pub(crate) fn begin(path: &Path) {
    if let Err(error) = memtrace_recover::begin(path) {
        terminal::say(&format!("{}: a trace without rows stays as it is: {error}", path.display()));
    }
}

fn recover_each(input: &Input, report: impl Fn(String)) -> Result<bool> {
    sweep(&folders(), None);
    let mut changed = false;
    let files = input.traces.iter().flat_map(|trace| trace.files().map(move |path| (trace, path)));
    for (trace, path) in files {
        // Completing one part of a rotated trace removes the empty part that follows it.
        if !path.exists() {
            continue;
        }
        // A compressed file was closed in order.
        if path.extension().is_none_or(|extension| extension != "csv") {
            continue;
        }
        let name = path.display();
        match repair(path)
            .with_context(|| format!("{name}: cannot complete the trace of a killed process"))?
        {
            Repaired::Finished { rows, lost, .. } => {
                changed = true;
                let lost = match lost {
                    0 => String::new(),
                    lost => format!("; {} lost, because the buffer was full", counted(lost, "event")),
                };
                report(format!(
                    "{name}: its process was killed; recovered {} from its journal{lost}",
                    counted(rows, "row")
                ));
            }
            Repaired::NoJournal => report(format!("{name}: {}", without_journal(&trace.meta))),
            Repaired::Refused(why) => report(format!(
                "{name}: no end row, and the last rows are missing: the file that it names as its journal was not \
                 used, because {why}"
            )),
            Repaired::Complete | Repaired::Running => {}
        }
    }
    Ok(changed)
}
