//! The phases and steps of a run over time.

use memtrace_trace::EventName;

use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::replay::{Replay, has_current_step};
use crate::state::series::TimeGrid;

/// A value over time, stored as the times at which it changes. At most one change is kept per bucket of the
/// grid, so the memory stays bounded however often the value changes.
#[derive(Clone, Debug)]
pub struct Bands<T> {
    grid: TimeGrid,
    /// The start of each value, in ns, and the value.
    pub starts: Vec<(i64, T)>,
}

impl<T: Copy + PartialEq> Bands<T> {
    /// Creates an empty series.
    #[must_use]
    pub fn new(grid: TimeGrid) -> Bands<T> {
        Bands { grid, starts: Vec::new() }
    }

    /// Sets the value from `ts_ns` on. `ts_ns` must not be earlier than in the previous call.
    pub fn set(&mut self, ts_ns: i64, value: T) {
        let ts_ns = ts_ns.max(self.grid.start_ns);
        if !self.grid.has(ts_ns) || self.starts.last().is_some_and(|(_, last)| *last == value) {
            return;
        }
        match self.starts.last_mut() {
            Some((start, last)) if self.grid.index(*start) == self.grid.index(ts_ns) => *last = value,
            _ => self.starts.push((ts_ns, value)),
        }
    }
}

/// One training step, or several merged steps, with its time and its peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpan {
    /// The numbers of the first and the last step of this entry. The numbers differ if steps were merged.
    pub numbers: (i64, i64),
    /// The start and the end, in ns.
    pub time_ns: (i64, i64),
    /// The highest total, in bytes.
    pub high: i64,
    /// The time of the highest total, in ns.
    pub high_ns: i64,
}

/// The steps of a run in at most [`Steps::MOST`] entries. Beyond that, adjacent steps are merged.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// The entries in order of time.
    pub steps: Vec<StepSpan>,
    /// The number of steps per entry; 0 if no steps were merged.
    per_entry: i64,
}

/// The phases and steps of a run over time.
#[derive(Clone, Debug)]
pub struct Progress {
    /// The phases.
    pub phases: Bands<Symbol>,
    /// The steps.
    pub steps: Steps,
    /// The time of the last out-of-memory error, in ns.
    oom_ns: Option<i64>,
}

impl Progress {
    /// Creates a `Progress` without phases and steps.
    #[must_use]
    pub fn new(grid: TimeGrid) -> Progress {
        Progress { phases: Bands::new(grid), steps: Steps::default(), oom_ns: None }
    }

    /// Adds a row, after the replay processed it. `total`, in bytes, is the total whose peak is kept per
    /// step.
    pub fn feed(&mut self, row: &Record, replay: &Replay, total: i64) {
        // Skip rows whose step and phase are not the program's current ones: at its exit, for example, a
        // process frees segments.
        let silent = !has_current_step(row.event)
            || matches!(row.event, EventName::SegmentFree | EventName::SegmentUnmap | EventName::End);
        if !silent && self.phases.grid.has(replay.ts_ns) {
            self.phases.set(replay.ts_ns, replay.phase);
            self.steps.set(replay.ts_ns, replay.step, total);
            if row.event == EventName::Oom {
                self.oom_ns = Some(replay.ts_ns);
            }
        }
    }

    /// Returns the time range to show first. If the steps take less than three fifths of `whole` and contain
    /// the peak, this is the range of the steps with a margin; otherwise, it is `whole`. A run with a single
    /// step gets `whole`, too, unless the step has an out-of-memory error.
    #[must_use]
    pub fn initial_range(&self, whole: (i64, i64), peak_ns: i64) -> (i64, i64) {
        let steps = &self.steps.steps;
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return whole };
        let (from, end) = (first.time_ns.0, last.time_ns.1);
        // After an OOM in the only step, end the range at the error. The shutdown after it takes longer than
        // the step.
        let oom_ns = self.oom_ns.filter(|oom| steps.len() == 1 && (from..=end).contains(oom));
        let to = oom_ns.unwrap_or(end);
        let few =
            (steps.len() > 1 || oom_ns.is_some()) && to > from && (to - from) < (whole.1 - whole.0) / 5 * 3;
        if !few || !(from..=to).contains(&peak_ns) {
            return whole;
        }
        let margin = (to - from) / 16;
        ((from - margin).max(whole.0), (to + margin).min(whole.1))
    }
}

impl Steps {
    /// The maximum number of entries.
    pub const MOST: usize = 8192;

    /// Adds a row at `ts_ns` in step `step`, with the total `value` in bytes. A negative step is before the
    /// first step and is ignored.
    pub fn set(&mut self, ts_ns: i64, step: i64, value: i64) {
        if step < 0 {
            return;
        }
        let per_entry = self.per_entry.max(1);
        if let Some(last) = self.steps.last_mut() {
            if (last.numbers.0..=last.numbers.1).contains(&step) {
                last.time_ns.1 = last.time_ns.1.max(ts_ns);
            } else if step > last.numbers.1 && step - last.numbers.0 < per_entry {
                last.numbers.1 = step;
                last.time_ns.1 = ts_ns;
            } else {
                last.time_ns.1 = ts_ns;
                self.open(ts_ns, step, value);
                return;
            }
            if value > last.high {
                (last.high, last.high_ns) = (value, ts_ns);
            }
        } else {
            self.open(ts_ns, step, value);
        }
    }

    /// Removes the steps after `last`, for example because the program did no work in them.
    pub fn end_with(&mut self, last: i64) {
        self.steps.retain(|step| step.numbers.0 <= last);
        if let Some(step) = self.steps.last_mut() {
            step.numbers.1 = step.numbers.1.min(last);
        }
    }

    fn open(&mut self, ts_ns: i64, step: i64, value: i64) {
        if self.steps.len() == Steps::MOST {
            self.per_entry = self.per_entry.max(1) * 2;
            let pairs = self.steps.chunks(2).map(|pair| {
                let (first, second) = (pair[0], pair[pair.len() - 1]);
                let higher = if second.high > first.high { second } else { first };
                StepSpan {
                    numbers: (first.numbers.0, second.numbers.1),
                    time_ns: (first.time_ns.0, second.time_ns.1),
                    ..higher
                }
            });
            self.steps = pairs.collect();
        }
        self.steps.push(StepSpan {
            numbers: (step, step),
            time_ns: (ts_ns, ts_ns),
            high: value,
            high_ns: ts_ns,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_merged_when_there_are_many() {
        let mut steps = Steps::default();
        for step in 0..20_000 {
            steps.set(step * 10, step, step);
        }
        assert!(steps.steps.len() <= Steps::MOST);
        assert_eq!(steps.steps[0].numbers, (0, 3));
        let last = steps.steps.last().unwrap();
        assert_eq!((last.numbers.1, last.high), (19_999, 19_999));
        for pair in steps.steps.windows(2) {
            assert_eq!(pair[0].numbers.1 + 1, pair[1].numbers.0);
        }
    }

    #[test]
    fn a_phase_changes_at_most_once_per_bucket() {
        let mut bands = Bands::new(TimeGrid::new(0, 99, 10));
        for (ts, what) in [(0, 'a'), (3, 'b'), (12, 'b'), (25, 'c'), (26, 'd'), (200, 'e')] {
            bands.set(ts, what);
        }
        assert_eq!(bands.starts, [(0, 'b'), (25, 'd')]);
    }

    #[test]
    fn rows_of_the_writer_thread_belong_to_no_step() {
        use crate::state::replay::{Metric, Window};
        let symbols = crate::read::symbols::SymbolTable::default();
        let mut replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        let mut progress = Progress::new(TimeGrid::new(0, 1000, 10));
        let rows = [(10, EventName::Alloc, 0), (20, EventName::Alloc, 0), (900, EventName::Sample, -1)];
        for (ts_ns, event, step) in rows {
            let row = Record { ts_ns, event, step, ..Record::default() };
            replay.feed(&row);
            progress.feed(&row, &replay, 1);
        }
        assert_eq!(progress.steps.steps[0].time_ns, (10, 20));
    }
}
