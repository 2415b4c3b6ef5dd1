//! The detailed steps of a trace (`MEMTRACE_DETAIL`). In the other steps, ops and modules are unknown.

use std::fmt::Write as _;

use memtrace_trace::counts::counted;
use memtrace_trace::detail::{Detail, DetailMark, Reason};
use memtrace_trace::{Api, Meta};
use serde_json::{Value, json};

use crate::read::record::{Columns, Record};
use crate::read::symbols::SymbolTable;

/// The columns that [`DetailedSteps::feed`] needs from the row of a mark.
pub const MARK_COLUMNS: Columns = Columns::of(&["api", "name", "step"]);

/// The maximum number of stretches kept, so that memory does not grow with the trace.
const MOST: usize = 1 << 16;
/// The maximum number of stretches in a note.
const SHOWN: usize = 6;

/// A run of consecutive detailed steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    first: i64,
    last: i64,
    /// The reason why the first step is detailed.
    reason: Reason,
}

/// The detailed steps, according to the marks of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DetailedSteps {
    stretches: Vec<Stretch>,
    /// True if there were more stretches than are kept.
    has_more: bool,
    /// True if some step has no detail.
    has_off: bool,
    /// The step in which an OOM turned detail on. Its start has no detail, so `stretches` does not contain
    /// it.
    partly: Option<i64>,
}

impl DetailedSteps {
    /// Processes the row of a mark. `step_before` is the highest step of the earlier rows; if it is the step
    /// of the mark, the step had already begun without detail.
    pub fn feed(&mut self, row: &Record, step_before: i64, symbols: &SymbolTable) {
        if *symbols.get(row.api) != *Api::Detail.as_str() {
            return;
        }
        match DetailMark::parse(&symbols.get(row.name)) {
            Some(DetailMark::On(reason)) => self.add(row.step, reason, step_before),
            Some(DetailMark::Off) => self.has_off = true,
            None => {}
        }
    }

    fn add(&mut self, step: i64, reason: Reason, step_before: i64) {
        let is_covered = self.stretches.last().is_some_and(|last| last.last == step);
        if reason == Reason::OutOfMemory && step == step_before && !is_covered {
            self.partly = Some(step);
            return;
        }
        if let Some(last) = self.stretches.last_mut()
            && (last.last..=last.last.saturating_add(1)).contains(&step)
        {
            last.last = step;
        } else if self.stretches.len() < MOST {
            self.stretches.push(Stretch { first: step, last: step, reason });
        } else {
            self.has_more = true;
        }
    }

    /// Returns true if every step of the trace is detailed.
    #[must_use]
    pub fn is_every(&self, meta: &Meta) -> bool {
        let starts_on = match Detail::parse(&meta.detail) {
            Ok(detail) => detail.includes(-1),
            // An older trace has no such setting, and a newer version may write an unknown one. Assume full
            // detail in both cases.
            Err(_) => true,
        };
        starts_on && !self.has_off
    }

    /// Returns one line that names the steps for which ops and modules are known, or `None` if they are known
    /// for all steps.
    #[must_use]
    pub fn note(&self, meta: &Meta) -> Option<String> {
        if self.is_every(meta) {
            return None;
        }
        let known = match self.stretches.len() {
            0 => "for no step".to_owned(),
            1 if self.stretches[0].first == self.stretches[0].last => {
                format!("only for step {}", self.stretches[0].first)
            }
            _ => format!("only for steps {}", self.list()),
        };
        Some(format!(
            "ops and modules are known {known} (MEMTRACE_DETAIL={}); the other steps have only memory, \
             phases and the owners of memory that stays",
            meta.detail
        ))
    }

    /// Lists the stretches, for example `0-4, 500 and 3 stretches`.
    fn list(&self) -> String {
        let mut text = String::new();
        for (index, Stretch { first, last, .. }) in self.stretches.iter().take(SHOWN).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let _ = if first == last {
                write!(text, "{comma}{first}")
            } else {
                write!(text, "{comma}{first}-{last}")
            };
        }
        let more = self.stretches.len().saturating_sub(SHOWN);
        if more > 0 || self.has_more {
            let least = if self.has_more { "at least " } else { "" };
            let _ = write!(text, " and {least}{}", counted(more as u64, "stretch"));
        }
        text
    }

    /// Returns a detailed step to look at instead of `step`, because it probably resembles `step`, and the
    /// reason for its detail. This is the next detailed step or, without one, the last one before. Returns
    /// `None` if `step` is detailed or no step is.
    fn instead_of(&self, step: i64) -> Option<(i64, Reason)> {
        let at = self.stretches.partition_point(|stretch| stretch.last < step);
        if let Some(next) = self.stretches.get(at) {
            // Work before the first step has the detail of step 0.
            let is_detailed = next.first <= step || (step < 0 && next.first == 0);
            return (!is_detailed).then_some((next.first, next.reason));
        }
        let before = self.stretches.get(at.checked_sub(1)?)?;
        Some((before.last, before.reason))
    }

    /// Returns true if the ops and modules of `step` are known.
    #[must_use]
    pub fn has(&self, step: i64, meta: &Meta) -> bool {
        // Work before the first step has the detail of step 0.
        let step = step.max(0);
        let at = self.stretches.partition_point(|stretch| stretch.last < step);
        self.stretches.get(at).is_some_and(|stretch| stretch.first <= step) || self.is_every(meta)
    }

    /// Returns one line for a report about a moment in `step`, or `None` if that step has detail. The line
    /// names the detailed step to look at instead, if there is one.
    #[must_use]
    pub fn about(&self, step: i64, meta: &Meta) -> Option<String> {
        if self.is_every(meta) {
            return None;
        }
        if self.stretches.is_empty() {
            return Some(format!("step {step} was recorded without detail, like all other steps"));
        }
        let (other, reason) = self.instead_of(step)?;
        let place = match other.checked_sub(step) {
            Some(1) => "the next step",
            Some(more) if more > 0 => "the next detailed step",
            _ => "the last detailed step",
        };
        let why = match reason {
            Reason::Scheduled => "",
            Reason::Asked => " (asked for)",
            Reason::Peak => " (new peak)",
            Reason::OutOfMemory => " (out of memory)",
        };
        let start = if self.partly == Some(step) { "the start of " } else { "" };
        Some(format!(
            "{start}step {step} was recorded without detail; {place}, {other}{why}, has it: --step {other}"
        ))
    }

    /// Returns the detailed steps for `--json` as the first and the last step of each stretch, or null if
    /// every step is detailed.
    #[must_use]
    pub fn json(&self, meta: &Meta) -> Value {
        if self.is_every(meta) {
            return Value::Null;
        }
        self.stretches.iter().map(|stretch| json!([stretch.first, stretch.last])).collect()
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::EventName;

    use super::*;

    fn meta(detail: &str) -> Meta {
        Meta { detail: detail.to_owned(), ..Meta::default() }
    }

    fn marked(marks: &[(i64, i64, DetailMark)]) -> DetailedSteps {
        let symbols = SymbolTable::default();
        let mut steps = DetailedSteps::default();
        for (before, step, mark) in marks {
            let row = Record {
                event: EventName::Mark,
                api: symbols.intern("detail"),
                name: symbols.intern(mark.as_str()),
                step: *step,
                ..Record::default()
            };
            steps.feed(&row, *before, &symbols);
            // The same text in a mark of the program (with another api) must have no effect.
            steps.feed(&Record { api: symbols.intern("memtrace"), step: 77, ..row }, *before, &symbols);
        }
        steps
    }

    use DetailMark::{Off, On};
    use Reason::{OutOfMemory, Peak, Scheduled};

    #[test]
    fn detail_of_every_step_has_no_note() {
        for setting in ["", "full", "every:1", "something of a newer version"] {
            let steps = marked(&[(-1, 0, On(Scheduled))]);
            assert_eq!((steps.note(&meta(setting)), steps.about(0, &meta(setting))), (None, None));
            assert_eq!(steps.json(&meta(setting)), Value::Null);
            assert!(steps.has(0, &meta(setting)) && steps.has(i64::MAX, &meta(setting)));
        }
    }

    #[test]
    fn detail_is_noted_by_its_steps_and_a_moment_without_it_has_the_step_to_look_at() {
        let meta = meta("steps:0-1");
        let steps = marked(&[
            (-1, 0, On(Scheduled)),
            (0, 1, On(Scheduled)),
            (1, 2, Off),
            (6, 7, On(Peak)),
            (7, 8, Off),
            (9, 9, On(OutOfMemory)),
            (9, 10, On(OutOfMemory)),
            (10, 11, Off),
        ]);
        let note = steps.note(&meta).unwrap();
        assert!(
            note.contains("only for steps 0-1, 7, 10 ") && note.contains("MEMTRACE_DETAIL=steps:0-1"),
            "{note}"
        );
        assert_eq!(steps.json(&meta), json!([[0, 1], [7, 7], [10, 10]]));
        let detailed: Vec<i64> = (-1..20).filter(|step| steps.has(*step, &meta)).collect();
        assert_eq!(detailed, [-1, 0, 1, 7, 10]);
        let about = |step| steps.about(step, &meta);
        assert_eq!([-1, 0, 1, 7, 10].map(about), [const { None }; 5]);
        assert_eq!(
            about(6).unwrap(),
            "step 6 was recorded without detail; the next step, 7 (new peak), has it: --step 7"
        );
        assert!(about(3).unwrap().contains("the next detailed step, 7 (new peak), has it"));
        assert!(about(9).unwrap().starts_with(
            "the start of step 9 was recorded without detail; the next step, 10 (out of memory)"
        ));
        assert!(about(12).unwrap().contains("the last detailed step, 10 (out of memory), has it"));
    }

    #[test]
    fn detail_of_no_step_is_noted() {
        let steps = DetailedSteps::default();
        assert!(steps.note(&meta("off")).unwrap().contains("known for no step"));
        assert!(steps.about(3, &meta("off")).unwrap().contains("like all other steps"));
        assert!(!steps.has(-1, &meta("off")) && !steps.has(3, &meta("off")));
        let one = marked(&[(4, 5, On(Peak)), (5, 6, Off)]);
        assert!(one.note(&meta("peak")).unwrap().contains("known only for step 5 "));
    }
}
