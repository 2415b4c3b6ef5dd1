//! Reports on stderr, and in the output folder, how the trials end.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use memtrace_analysis::render::numbers::duration;
use memtrace_trace::private_file;
use memtrace_trace::text::printable;
use memtrace_trace::units::Unit;

use super::launch::TRIALS_FILE;
use super::outcome::Trial;
use super::peak::PeakUse;
use crate::terminal;

/// Prints a line for each trial when it ends, and appends the line to [`TRIALS_FILE`]. A terminal also shows
/// the trials in progress.
pub(super) struct Progress {
    on_terminal: bool,
    file: PathBuf,
}

impl Progress {
    /// Prepares the list in `folder`.
    pub(super) fn new(folder: &Path) -> Progress {
        Progress { on_terminal: std::io::stderr().is_terminal(), file: folder.join(TRIALS_FILE) }
    }

    pub(super) fn trying(&self, values: &str, number: usize) {
        if self.on_terminal {
            terminal::show_progress(&format!("trial {number}: trying {values} ..."));
        }
    }

    pub(super) fn clear(&self) {
        if self.on_terminal {
            terminal::show_progress("");
        }
    }

    pub(super) fn tried(&self, trial: &Trial) {
        let took = duration(trial.took.as_nanos() as i64);
        // For a program without torch, only `used` is known.
        let PeakUse { allocated, used, .. } = trial.peak;
        let peak = Unit::Auto.show(if allocated > 0 { allocated } else { used });
        self.say(&format!("{}: {}, peak {peak}, {took}", trial.label, trial.outcome.word()));
    }

    pub(super) fn say(&self, line: &str) {
        let line = printable(line);
        writeln!(std::io::stderr(), "{line}").ok();
        // Ignore errors: the lines are also on stderr, and a full disk must not end the search.
        let file = private_file::append_or_create(&self.file);
        file.and_then(|mut file| writeln!(file, "{line}")).ok();
    }
}
