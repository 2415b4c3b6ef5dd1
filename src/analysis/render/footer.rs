//! The last lines of every report: how far it can be trusted.

use super::numbers::{count, percent, share};
use super::phantom_run::PhantomRun;
use super::printer::{Cell, Printer, Style};
use crate::profile;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::state::categories;
use crate::state::replay_trace::Replayed;

/// What ends every report: how far it can be trusted.
#[derive(Clone, Debug, Default)]
pub struct Footer {
    /// Events that the traced processes dropped.
    pub lost: u64,
    /// Bytes at the peaks that nothing says the owner of, and all of them.
    pub unattributed: (i64, i64),
    /// The same of all bytes that blocks were given in the part that was looked at, whenever.
    pub unattributed_ever: (i64, i64),
    /// The runs on a device that is not there.
    pub phantom: PhantomRun,
    /// What else the reader should know.
    pub notes: Vec<String>,
}

impl Footer {
    /// The footer of a report on `input`.
    #[must_use]
    pub fn new(input: &Input) -> Footer {
        let mut footer = Footer { notes: input.notes.clone(), ..Footer::default() };
        footer.phantom.add(input);
        footer
    }

    /// Takes in what was learned of one trace. `ordinal` is the device that the report is about.
    pub fn add(&mut self, trace: &TraceFile, replayed: &Replayed, ordinal: Option<i32>) {
        self.lost += replayed.replay.counts.lost;
        if let Some(ordinal) = ordinal {
            self.add_share(replayed, ordinal);
        }
        let name = trace.path.file_name().unwrap_or(trace.path.as_os_str()).display();
        if replayed.replay.problems.unfinished {
            self.notes.push(format!("{name} has no end row: the process was killed, or still runs"));
        }
        if let Some(first) = &replayed.told.first_skipped {
            let skipped = count(replayed.told.skipped);
            self.notes.push(format!("{skipped} lines are not rows and were passed over; the first: {first}"));
        }
        self.notes.extend(trace.meta.degraded.iter().cloned());
    }

    /// Takes in whose a device's peak was: all of a report that does not read to the end.
    pub fn add_share(&mut self, replayed: &Replayed, ordinal: i32) {
        let (peak, ever) = (replayed.unattributed(ordinal), replayed.replay.given(ordinal));
        self.add_bytes(peak, ever);
    }

    /// Takes in bytes that nobody owns, and all of them: at a peak, and ever.
    pub fn add_bytes(&mut self, peak: (i64, i64), ever: (i64, i64)) {
        for (sum, more) in [(&mut self.unattributed, peak), (&mut self.unattributed_ever, ever)] {
            *sum = (sum.0.saturating_add(more.0), sum.1.saturating_add(more.1));
        }
    }

    /// Says how categories were inferred, where they were: for reports that show them.
    pub fn note_inference(&mut self, replayed: &Replayed) {
        let by_flow = !replayed.replay.flow.is_empty();
        let rule = if by_flow { profile::RULE } else { categories::RULE }.to_owned();
        if replayed.replay.infers() && !self.notes.contains(&rule) {
            self.notes.push(rule);
        }
    }

    /// The share of the peak that has no owner, from 0 to 1.
    #[must_use]
    pub fn unattributed_share(&self) -> f64 {
        share(self.unattributed.0, self.unattributed.1)
    }

    /// The share of all bytes ever handed out that has no owner, from 0 to 1.
    #[must_use]
    pub fn unattributed_share_ever(&self) -> f64 {
        share(self.unattributed_ever.0, self.unattributed_ever.1)
    }

    /// Adds the footer's lines to a page.
    pub fn print(&self, printer: &mut Printer) {
        let lost = format!("{} events lost", count(self.lost));
        printer.line([
            Cell::new(lost, if self.lost > 0 { Style::Alarm } else { Style::Faint }),
            Cell::new(
                format!(
                    ", {} of the peak unattributed, {} of all bytes allocated",
                    percent(self.unattributed_share()),
                    percent(self.unattributed_share_ever())
                ),
                Style::Faint,
            ),
        ]);
        if self.phantom.is_any() {
            printer.line([Cell::new(format!("note: {}", self.phantom.note()), Style::Faint)]);
        }
        for note in &self.notes {
            printer.line([Cell::new(format!("note: {note}"), Style::Faint)]);
        }
    }
}
