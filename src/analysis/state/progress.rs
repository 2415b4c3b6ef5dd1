//! The phases and steps of a run over time.

use memtrace_trace::EventName;

use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::replay::{Replay, tells_step};
use crate::state::series::TimeGrid;

/// What ran when: the phase or the step, as the starts of what differs from what was before. No two
/// starts lie in one piece of the grid, so however often it changes, this is bounded.
#[derive(Clone, Debug)]
pub struct Bands<T> {
    grid: TimeGrid,
    /// When each begins, ns, and what it is.
    pub starts: Vec<(i64, T)>,
}

impl<T: Copy + PartialEq> Bands<T> {
    /// Nothing yet.
    #[must_use]
    pub fn new(grid: TimeGrid) -> Bands<T> {
        Bands { grid, starts: Vec::new() }
    }

    /// From `ts_ns` on it is `what`.
    pub fn set(&mut self, ts_ns: i64, what: T) {
        let ts_ns = ts_ns.max(self.grid.start_ns);
        if !self.grid.has(ts_ns) || self.starts.last().is_some_and(|(_, last)| *last == what) {
            return;
        }
        match self.starts.last_mut() {
            Some((start, last)) if self.grid.index(*start) == self.grid.index(ts_ns) => *last = what,
            _ => self.starts.push((ts_ns, what)),
        }
    }
}

/// One training step: when it was, and how high memory went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its number, and the last one's when short steps were put together.
    pub numbers: (i64, i64),
    /// From and to, ns.
    pub time_ns: (i64, i64),
    /// The highest total, in bytes.
    pub high: i64,
    /// When that was, ns.
    pub high_ns: i64,
}

/// The steps of a run, at most [`Steps::MOST`]: beyond that, neighbours are put together.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// In the order of time.
    pub steps: Vec<Step>,
    /// How many steps one entry stands for.
    together: i64,
}

/// What ran when: the phases and the steps.
#[derive(Clone, Debug)]
pub struct Progress {
    /// The phases.
    pub phases: Bands<Symbol>,
    /// The steps.
    pub steps: Steps,
    /// The last out-of-memory error.
    oom_ns: Option<i64>,
}

impl Progress {
    /// Nothing yet.
    #[must_use]
    pub fn new(grid: TimeGrid) -> Progress {
        Progress { phases: Bands::new(grid), steps: Steps::default(), oom_ns: None }
    }

    /// Takes a row after the replay did; `total` is the one whose peak in each step counts.
    pub fn feed(&mut self, row: &Record, replay: &Replay, total: i64) {
        // What a process gives back at its end is of no step.
        let silent = !tells_step(row.event)
            || matches!(row.event, EventName::SegmentFree | EventName::SegmentUnmap | EventName::End);
        if !silent && self.phases.grid.has(replay.ts_ns) {
            self.phases.set(replay.ts_ns, replay.phase);
            self.steps.set(replay.ts_ns, replay.step, total);
            if row.event == EventName::Oom {
                self.oom_ns = Some(replay.ts_ns);
            }
        }
    }

    /// What to look at first: `whole`, or the steps when they are a small part of it and hold the peak.
    #[must_use]
    pub fn home(&self, whole: (i64, i64), peak_ns: i64) -> (i64, i64) {
        let steps = &self.steps.steps;
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return whole };
        let (from, end) = (first.time_ns.0, last.time_ns.1);
        // Out of memory in its first step: all that led there, and not the way out, which takes longer.
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
    /// How many entries there can be.
    pub const MOST: usize = 8192;

    /// At `ts_ns`, step `step` ran (negative: none) and the total was `value`.
    pub fn set(&mut self, ts_ns: i64, step: i64, value: i64) {
        if step < 0 {
            return;
        }
        let together = self.together.max(1);
        if let Some(last) = self.steps.last_mut() {
            if (last.numbers.0..=last.numbers.1).contains(&step) {
                last.time_ns.1 = last.time_ns.1.max(ts_ns);
            } else if step > last.numbers.1 && step - last.numbers.0 < together {
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

    fn open(&mut self, ts_ns: i64, step: i64, value: i64) {
        if self.steps.len() == Steps::MOST {
            self.together = self.together.max(1) * 2;
            let pairs = self.steps.chunks(2).map(|pair| {
                let (first, second) = (pair[0], pair[pair.len() - 1]);
                let higher = if second.high > first.high { second } else { first };
                Step {
                    numbers: (first.numbers.0, second.numbers.1),
                    time_ns: (first.time_ns.0, second.time_ns.1),
                    ..higher
                }
            });
            self.steps = pairs.collect();
        }
        self.steps.push(Step { numbers: (step, step), time_ns: (ts_ns, ts_ns), high: value, high_ns: ts_ns });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_put_together_when_there_are_many() {
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
    fn bands_change_at_most_once_a_piece() {
        let mut bands = Bands::new(TimeGrid::new(0, 99, 10));
        for (ts, what) in [(0, 'a'), (3, 'b'), (12, 'b'), (25, 'c'), (26, 'd'), (200, 'e')] {
            bands.set(ts, what);
        }
        assert_eq!(bands.starts, [(0, 'b'), (25, 'd')]);
    }

    #[test]
    fn what_the_writer_thread_says_is_of_no_step() {
        use crate::state::replay::{Metric, Window};
        let symbols = crate::read::symbols::SymbolTable::default();
        let mut replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        let mut course = Progress::new(TimeGrid::new(0, 1000, 10));
        let rows = [(10, EventName::Alloc, 0), (20, EventName::Alloc, 0), (900, EventName::Sample, -1)];
        for (ts_ns, event, step) in rows {
            let row = Record { ts_ns, event, step, ..Record::default() };
            replay.feed(&row);
            course.feed(&row, &replay, 1);
        }
        assert_eq!(course.steps.steps[0].time_ns, (10, 20));
    }
}
