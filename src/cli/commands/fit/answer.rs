//! What `memtrace fit` found, for people and for programs.

use memtrace_analysis::render::numbers::{duration, percent, share};

use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use super::trial::{Outcome, Taken, Trial, outcome_word};
use crate::terminal;

/// The end of a search.
pub(crate) struct Answer<'a> {
    /// The program as it was given, `{}` in the place of the value.
    pub(crate) command: Vec<String>,
    /// The largest value that fits.
    pub(crate) fits: Option<&'a Trial>,
    /// The smallest that does not.
    pub(crate) too_big: Option<&'a Trial>,
    /// All runs, in their order.
    pub(crate) trials: Vec<&'a Trial>,
    /// Did the user set the end of the values?
    pub(crate) asked_for_more: bool,
    /// Why the search has no answer.
    pub(crate) stopped: Option<String>,
}

fn show(bytes: i64) -> String {
    Unit::Auto.show(bytes).to_string()
}

impl Answer<'_> {
    /// What the fullest trial says of the device.
    fn device(&self) -> Option<&Taken> {
        self.trials.iter().map(|trial| &trial.taken).find(|taken| taken.processes > 0)
    }

    /// The screen.
    pub(crate) fn text(&self) -> String {
        let stdout = std::io::stdout();
        let mut page = Printer::new(terminal::paints("auto", &stdout), terminal::width(&stdout));
        self.heading(&mut page);
        page.gap();
        self.runs(&mut page);
        page.gap();
        self.verdict(&mut page);
        self.held(&mut page);
        let retries = self.fits.map_or(0, |trial| trial.taken.retries);
        if retries > 0 {
            page.gap();
            page.plain(format!(
                "note: the largest fits only because the allocator emptied its cache {retries} times, which is slow on a \
                 real device; a little less runs smoothly"
            ));
        }
        if self.device().is_some_and(|taken| taken.phantom) {
            page.line([Cell::new(
                "note: on a device that is not there: allocated memory is PyTorch's own arithmetic, reserved memory an estimate",
                Style::Faint,
            )]);
        }
        page.gap();
        for next in self.next() {
            page.line([Cell::new("next: ", Style::Faint), Cell::new(next, Style::Command)]);
        }
        page.text().to_owned()
    }

    fn heading(&self, page: &mut Printer) {
        // Where python and the script are says nothing new to the one who started them.
        let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
        let words: Vec<String> = self
            .command
            .iter()
            .enumerate()
            .map(|(index, word)| if index < 2 { base(word) } else { word.clone() })
            .collect();
        let mut cells = vec![Cell::new(words.join(" "), Style::Strong)];
        if let Some(taken) = self.device() {
            let mut about = format!("  {}, {}", taken.device, show(taken.capacity));
            if taken.processes > 1 {
                about.push_str(&format!("  {} processes", taken.processes));
            }
            cells.push(Cell::new(about, Style::Faint));
            if taken.phantom {
                cells.push(Cell::new("  (phantom: a device that is not there)", Style::Alarm));
            }
        }
        page.line(cells);
    }

    fn runs(&self, page: &mut Printer) {
        let mut table = Table::new(&[
            ("value", Side::Right),
            ("", Side::Left),
            ("peak allocated", Side::Right),
            ("reserved", Side::Right),
            ("of the device", Side::Right),
            ("retries", Side::Right),
            ("took", Side::Right),
        ]);
        let mut trials = self.trials.clone();
        // As numbers where they are, else in the order of the runs.
        trials.sort_by_key(|trial| trial.value.parse::<u64>().unwrap_or(0));
        for trial in trials {
            let taken = &trial.taken;
            let style = if trial.outcome == Outcome::Fits { Style::Plain } else { Style::Alarm };
            table.row([
                Cell::new(trial.value.clone(), Style::Strong),
                Cell::new(outcome_word(&trial.outcome), style),
                show(taken.allocated).into(),
                show(taken.reserved).into(),
                percent(share(taken.used, taken.capacity)).into(),
                taken.retries.to_string().into(),
                duration(trial.took.as_nanos() as i64).into(),
            ]);
        }
        page.table(&table);
    }

    fn verdict(&self, page: &mut Printer) {
        if let Some(why) = &self.stopped {
            page.line([Cell::new("no answer: ", Style::Alarm), why.as_str().into()]);
            for trial in &self.trials {
                let Outcome::Failed(ended, tail) = &trial.outcome else { continue };
                page.plain(format!("with {} it ended with {ended}; the last that it said:", trial.value));
                for line in tail {
                    page.line([Cell::new(format!("    {line}"), Style::Faint)]);
                }
            }
            return;
        }
        match (self.fits, self.too_big) {
            (Some(fits), Some(too_big)) => page.line([
                Cell::new(fits.value.clone(), Style::Strong),
                format!(" fits, {} does not", too_big.value).into(),
            ]),
            (Some(fits), None) => page.line([
                Cell::new(fits.value.clone(), Style::Strong),
                format!(
                    " fits, the largest that was {}",
                    if self.asked_for_more { "asked for" } else { "tried" }
                )
                .into(),
            ]),
            (None, Some(too_big)) => {
                page.line([Cell::new(format!("not even {} fits", too_big.value), Style::Alarm)]);
            }
            (None, None) => {}
        }
        if let Some(Trial { value, outcome: Outcome::TooBig(asked), .. }) = self.too_big
            && !asked.is_empty()
        {
            page.plain(format!("with {value} there was no room when it {asked}"));
        }
    }

    /// What holds the memory at the two ends of the gap, side by side.
    fn held(&self, page: &mut Printer) {
        let sides: Vec<&Trial> = [self.fits, self.too_big].into_iter().flatten().collect();
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in sides.iter().rev().flat_map(|trial| &trial.taken.held) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        if names.is_empty() {
            return;
        }
        page.gap();
        let heads: Vec<String> = sides.iter().map(|trial| trial.value.clone()).collect();
        let mut columns = vec![("live at the peak with", Side::Left)];
        for head in &heads {
            columns.extend([(head.as_str(), Side::Right), ("", Side::Right)]);
        }
        let mut table = Table::new(&columns);
        for name in names {
            let mut row: Vec<Cell> = vec![name.into()];
            for trial in &sides {
                let bytes =
                    trial.taken.held.iter().find(|(held, _)| held == name).map_or(0, |(_, bytes)| *bytes);
                row.push(show(bytes).into());
                row.push(percent(share(bytes, trial.taken.allocated)).into());
            }
            table.row(row);
        }
        page.table(&table);
    }

    fn next(&self) -> Vec<String> {
        let mut next = Vec::new();
        if let Some(trial) = self.too_big.filter(|trial| trial.taken.processes > 0) {
            next.push(format!("memtrace oom {}", trial.folder.display()));
        }
        if let Some(trial) = self.fits {
            next.push(format!("memtrace peak --by module {}", trial.folder.display()));
        }
        if next.is_empty()
            && let Some(trial) = self.trials.last()
        {
            next.push(format!("less {}", trial.folder.join("stderr.txt").display()));
        }
        next
    }

    /// For programs.
    pub(crate) fn json(&self) -> Value {
        let value = |trial: Option<&Trial>| trial.map(|trial| trial.value.clone());
        let trials: Vec<Value> = self.trials.iter().map(|trial| of_trial(trial)).collect();
        json!({
            "report": "fit",
            "command": self.command,
            "phantom": self.device().is_some_and(|taken| taken.phantom),
            "device": self.device().map(|taken| taken.device.clone()),
            "capacity_bytes": self.device().map_or(0, |taken| taken.capacity),
            "fits": value(self.fits),
            "too_big": value(self.too_big),
            "stopped": self.stopped,
            "trials": trials,
            "next": self.next(),
        })
    }
}

fn of_trial(trial: &Trial) -> Value {
    let taken = &trial.taken;
    let held: serde_json::Map<String, Value> =
        taken.held.iter().map(|(name, bytes)| (name.clone(), (*bytes).into())).collect();
    let (asked, ended, tail) = match &trial.outcome {
        Outcome::Fits => (None, None, None),
        Outcome::TooBig(asked) => (Some(asked), None, None),
        Outcome::Failed(ended, tail) => (None, Some(ended), Some(tail)),
    };
    json!({
        "value": trial.value,
        "outcome": outcome_word(&trial.outcome),
        "asked": asked,
        "ended": ended,
        "stderr_tail": tail,
        "peak_allocated_bytes": taken.allocated,
        "peak_reserved_bytes": taken.reserved,
        "peak_used_bytes": taken.used,
        "retries": taken.retries,
        "processes": taken.processes,
        "at_peak_by_category_bytes": held,
        "seconds": trial.took.as_secs_f64(),
        "folder": trial.folder.display().to_string(),
    })
}
