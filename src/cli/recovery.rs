//! Completes the traces of killed processes from their journals, before a command reads them.

use std::path::Path;

use anyhow::{Context, Result};
use memtrace_analysis::read::input::Input;
use memtrace_recover::{Repaired, repair, sweep};
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
    for path in input.traces.iter().flat_map(|trace| trace.files()) {
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
                    lost => format!("; {lost} events are lost, because the buffer was full"),
                };
                report(format!(
                    "{name}: its process was killed; {rows} rows were recovered from its journal{lost}"
                ));
            }
            Repaired::NoJournal => report(format!(
                "{name}: its process was killed and its journal no longer exists, so the last rows are \
                 missing"
            )),
            Repaired::Refused(why) => report(format!(
                "{name}: its process was killed, and its last rows are missing: the file that it names as its \
                 journal was not used, because {why}"
            )),
            Repaired::Complete | Repaired::Running => {}
        }
    }
    Ok(changed)
}
