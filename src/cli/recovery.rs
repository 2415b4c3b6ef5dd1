//! Traces of processes that were killed: finished from their journals before anything reads them.

use anyhow::{Context, Result};
use memtrace_analysis::read::input::Input;
use memtrace_recover::{Repaired, repair};

/// Finishes the traces of `input` whose processes left a journal behind and says so on stderr; true when
/// there were any.
pub(crate) fn finish(input: &Input) -> Result<bool> {
    finish_and_say(input, |line| eprintln!("memtrace: {line}"))
}

/// The same without a word, where a killed process is no news.
pub(crate) fn finish_quietly(input: &Input) -> Result<bool> {
    finish_and_say(input, |_| {})
}

fn finish_and_say(input: &Input, say: impl Fn(String)) -> Result<bool> {
    let mut finished = false;
    for path in input.traces.iter().flat_map(|trace| trace.files()) {
        // A part that has nothing of its own goes when the one before it is finished.
        if !path.exists() {
            continue;
        }
        if path.extension().is_none_or(|extension| extension != "csv") {
            continue;
        }
        let name = path.display();
        match repair(path).with_context(|| format!("{name}: cannot finish what a killed process left"))? {
            Repaired::Finished { rows, .. } => {
                finished = true;
                say(format!("{name}: its process was killed; {rows} rows came from its journal"));
            }
            Repaired::NoJournal => {
                say(format!("{name}: its process was killed and its journal is gone: the end is missing"));
            }
            Repaired::Complete | Repaired::Running => {}
        }
    }
    Ok(finished)
}
