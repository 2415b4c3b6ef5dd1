//! The last lines of every report: lost events, memory without an owner, and notes.

use std::path::Path;

use memtrace_trace::end_row;
use memtrace_trace::key_values::key_values;
use memtrace_trace::text::printable;
use memtrace_util::process::start_of;

use super::numbers::{counted, percent, share};
use super::phantom_run::PhantomRun;
use super::printer::{Cell, Printer, Style};
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::{ReadSummary, TraceFile};
use crate::state::categories::KnownCategories;
use crate::state::detail::DetailedSteps;
use crate::state::replay::Metric;
use crate::state::replay_trace::{Replayed, replay_trace};

/// The footer of a report, which shows how complete the report's data is.
#[derive(Clone, Debug)]
pub struct Footer {
    /// The number of events that the traced processes dropped.
    pub lost: u64,
    /// The bytes at the peaks that have neither op nor module nor category, and all bytes at the peaks.
    pub unattributed: (i64, i64),
    /// The same two sums as in `unattributed`, but over every block allocated in the window.
    pub unattributed_ever: (i64, i64),
    /// The key by which the report groups the peak, and the share of the peak that lacks this key (0 to 1).
    pub without_key: Option<(&'static str, f64)>,
    /// The runs on a simulated GPU.
    pub phantom: PhantomRun,
    /// The damage of the traces, one line each. The damage can make totals and peaks wrong.
    pub damage: Vec<String>,
    /// Further notes, one line each.
    pub notes: Vec<String>,
}

impl Footer {
    /// Returns a footer with the notes on `inputs` and on their runs on a simulated GPU. Each trace that a report
    /// reads must then be added with one of the methods below, whether the report shows it or not.
    #[must_use]
    pub fn of<'a>(inputs: impl IntoIterator<Item = &'a Input>) -> Footer {
        let inputs: Vec<&Input> = inputs.into_iter().collect();
        let mut footer = Footer {
            lost: 0,
            unattributed: (0, 0),
            unattributed_ever: (0, 0),
            without_key: None,
            phantom: PhantomRun::default(),
            damage: Vec::new(),
            notes: Vec::new(),
        };
        for input in &inputs {
            footer.phantom.add(input);
            footer.notes.extend(input.notes.iter().map(|note| match inputs.len() {
                1 => note.clone(),
                _ => format!("{}: {note}", input.path.display()),
            }));
        }
        footer.notes.extend(footer.phantom.warning());
        footer
    }

    /// Adds the notes on one replayed trace. The report shows the device with the highest peak of allocated memory.
    pub fn add(&mut self, trace: &TraceFile, replayed: &Replayed, options: &Options) {
        let fullest = replayed.fullest(Metric::Allocated, options).map(|device| device.ordinal);
        self.add_with_device(trace, replayed, fullest);
    }

    /// Same as [`Footer::add`], but the report shows the device `ordinal`, or no device.
    pub fn add_with_device(&mut self, trace: &TraceFile, replayed: &Replayed, ordinal: Option<i32>) {
        self.add_reading(trace, replayed);
        if let Some(ordinal) = ordinal {
            self.add_share(replayed, ordinal);
        }
        let name = trace.path.file_name().unwrap_or(trace.path.as_os_str()).display();
        if replayed.replay.problems.unfinished {
            // The command removes the journal of a killed process before it reads the trace, so an existing
            // journal belongs to a running process.
            let is_running = Path::new(&trace.meta.journal).is_file()
                && trace.pid().parse().is_ok_and(|pid| start_of(pid).is_some());
            self.notes.push(if is_running {
                format!("{name} has no end row yet: its process still runs")
            } else {
                format!(
                    "{name} has no end row: the process was killed or still runs, or the file is an incomplete copy"
                )
            });
        }
        self.note_degraded(trace);
        let ending = trace.ending().unwrap_or_default();
        if key_values(&ending).any(|(key, _)| key == end_row::WITHOUT_MODULES) {
            self.notes.push(format!(
                "{name}: no modules, categories and steps: memtrace found no safe moment to install its \
                 hooks in Python"
            ));
        }
        self.note_detail(trace, &replayed.replay.detail);
    }

    /// Adds a note for each part of the traced process that could not be captured, unless the footer has the
    /// note already.
    pub fn note_degraded(&mut self, trace: &TraceFile) {
        for note in &trace.meta.degraded {
            if !self.notes.contains(note) {
                self.notes.push(note.clone());
            }
        }
    }

    /// Adds a note with the steps for which ops and modules are known, unless they are known for all steps.
    pub fn note_detail(&mut self, trace: &TraceFile, detail: &DetailedSteps) {
        let note = detail.note(&trace.meta);
        self.notes.extend(note.filter(|note| !self.notes.contains(note)));
    }

    /// Reads a trace to its end, and adds its lost events and damage. For a report that has no replay of the trace,
    /// for example because the wanted moment does not exist.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub fn read(&mut self, trace: &TraceFile, options: &Options) -> Result<()> {
        let known = KnownCategories::default();
        let nothing = Columns::of(&[]);
        let replayed = replay_trace(trace, nothing, options, Metric::Allocated, known, |_, _| {})?;
        self.add_reading(trace, &replayed);
        Ok(())
    }

    /// Adds the lost events and the damage of a trace. For a report that stops before the end of the trace,
    /// which must not call [`Footer::add`]: that method notes a missing end row.
    pub fn add_reading(&mut self, trace: &TraceFile, replayed: &Replayed) {
        self.lost += replayed.replay.counts.lost;
        let name = trace.path.file_name().unwrap_or(trace.path.as_os_str()).display();
        if let [first, ..] = replayed.summary.skipped_lines.as_slice() {
            let skipped = counted(replayed.summary.skipped, "invalid line");
            self.damage.push(format!("{name}: skipped {skipped}; the first: {first}"));
        }
        let errors = replayed.summary.read_errors.iter();
        self.damage.extend(errors.map(|error| format!("{error}: the rows after this point are missing")));
        self.damage.extend(replayed.summary.wrong_openings.iter().cloned());
        if replayed.summary.shortened {
            self.damage
                .push(format!("{name}: became shorter while it was read: its last rows may be missing"));
        }
        self.add_removed(trace, &replayed.summary);
        let problems = &replayed.replay.problems;
        if let Some(after) = problems.first_gap {
            let found = match problems.missing_rows {
                0 => "the rows are out of order".to_owned(),
                1 => "1 row is missing".to_owned(),
                rows => format!("{} are missing", counted(rows, "row")),
            };
            self.damage.push(format!(
                "{name}: {found}, first after seq {after}: totals and peaks may be wrong; memtrace check lists \
                 the damage"
            ));
        }
    }

    /// Adds a note on the missing parts of a trace, whether the recorder removed them or not.
    fn add_removed(&mut self, trace: &TraceFile, summary: &ReadSummary) {
        let ranges: Vec<String> = summary
            .removed
            .iter()
            .map(|(first, last)| if first == last { first.to_string() } else { format!("{first} to {last}") })
            .collect();
        if ranges.is_empty() {
            return;
        }
        let name = trace.path.file_name().unwrap_or(trace.path.as_os_str()).display();
        let parts = if ranges.len() == 1 && !ranges[0].contains(' ') { "part" } else { "parts" };
        let parts = format!("{name}: {parts} {}", ranges.join(", "));
        let keep = &trace.meta.keep;
        if keep.is_empty() {
            self.damage.push(format!(
                "{parts} not found: counts, ops and steps of that time are missing, and perhaps the peak, too"
            ));
        } else {
            self.notes.push(format!(
                "{parts} removed (MEMTRACE_KEEP={}): counts, ops and steps of that time are missing, but \
                 the highest allocated and reserved bytes are kept",
                printable(keep)
            ));
        }
    }

    /// Returns the damage and the notes as one list, for `--json` and the HTML page.
    pub fn all_notes(&self) -> impl Iterator<Item = String> + use<'_> {
        let damage = self.damage.iter().map(|text| format!("damaged: {text}"));
        damage.chain(self.notes.iter().cloned())
    }

    /// Adds the unattributed bytes of a device.
    pub fn add_share(&mut self, replayed: &Replayed, ordinal: i32) {
        let (peak, ever) = (replayed.unattributed(ordinal), replayed.replay.unowned_and_total(ordinal));
        self.add_bytes(peak, ever);
    }

    /// Adds sums as (unattributed bytes, all bytes): one pair for the peak, and one pair for every block
    /// allocated in the window.
    pub fn add_bytes(&mut self, peak: (i64, i64), ever: (i64, i64)) {
        for (sum, more) in [(&mut self.unattributed, peak), (&mut self.unattributed_ever, ever)] {
            *sum = (sum.0.saturating_add(more.0), sum.1.saturating_add(more.1));
        }
    }

    /// Adds the rule by which categories were inferred, if any were. Reports that show categories call this.
    pub fn note_inference(&mut self, replayed: &Replayed) {
        let rule = replayed.replay.rule().to_owned();
        if replayed.replay.infers() && !self.notes.contains(&rule) {
            self.notes.push(rule);
        }
    }

    /// Returns the share of the peak without an owner, from 0 to 1.
    #[must_use]
    pub fn unattributed_share(&self) -> f64 {
        share(self.unattributed.0, self.unattributed.1)
    }

    /// Returns the share of all bytes allocated in the window without an owner, from 0 to 1.
    #[must_use]
    pub fn unattributed_share_ever(&self) -> f64 {
        share(self.unattributed_ever.0, self.unattributed_ever.1)
    }

    /// Prints the footer.
    pub fn print(&self, printer: &mut Printer) {
        let key = self.without_key.map_or_else(String::new, |(key, share)| {
            let article = if key.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
            format!("; without {article} {key}: {} of the peak", percent(share))
        });
        let lost = format!("{} lost", counted(self.lost, "event"));
        printer.line([
            Cell::new(lost, if self.lost > 0 { Style::Alarm } else { Style::Faint }),
            Cell::new(
                format!(
                    "{key}; without any owner: {} of the peak, {} of all bytes allocated",
                    percent(self.unattributed_share()),
                    percent(self.unattributed_share_ever())
                ),
                Style::Faint,
            ),
        ]);
        for text in &self.damage {
            printer.line([Cell::new(format!("damaged: {text}"), Style::Alarm)]);
        }
        if self.phantom.is_any() {
            printer.line([Cell::new(format!("note: {}", self.phantom.note()), Style::Faint)]);
        }
        for note in &self.notes {
            printer.line([Cell::new(format!("note: {note}"), Style::Faint)]);
        }
    }
}
