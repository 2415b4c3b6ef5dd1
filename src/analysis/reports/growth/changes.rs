//! The owners whose memory changed most in each part of the memory in use.

use memtrace_trace::units::Unit;
use serde_json::{Map, Value, json};

use super::limits::FEWEST_STEPS;
use super::part::GrowthPart;

/// The number of owners that are kept for a part.
const SHOWN: usize = 3;

/// The memory of an owner at two levels, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    what: String,
    before: i64,
    after: i64,
    /// The number of steps in which the new memory was allocated; 0 if they were not counted.
    steps: usize,
}

impl Change {
    /// Returns the change of an owner that has memory at both levels. The steps are not counted.
    pub(super) fn between(what: String, before: i64, after: i64) -> Change {
        Change { what, before, after, steps: 0 }
    }

    /// Returns the change of an owner whose memory is new. `steps` has the step of each allocation, in any
    /// order.
    pub(super) fn new(what: String, after: i64, mut steps: Vec<i64>) -> Change {
        steps.sort_unstable();
        steps.dedup();
        Change { what, before: 0, after, steps: steps.len() }
    }

    pub(super) fn what(&self) -> &str {
        &self.what
    }

    /// Returns the bytes by which the owner's memory grew.
    pub(super) fn growth(&self) -> i64 {
        self.after - self.before
    }

    /// Returns true if the memory is known to be from only one or two steps.
    pub(super) fn is_of_few_steps(&self) -> bool {
        (1..FEWEST_STEPS).contains(&self.steps)
    }

    pub(super) fn line(&self, units: Unit) -> String {
        let Change { what, before, after, .. } = self;
        let more = units.show(self.growth());
        if *before == 0 {
            format!("{more} of {what}")
        } else {
            format!("{more} more of {what}: {} before, now {}", units.show(*before), units.show(*after))
        }
    }

    fn json(&self) -> Value {
        json!({ "what": self.what, "before_bytes": self.before, "after_bytes": self.after, "steps": self.steps })
    }
}

/// The changes of each part, with the largest growth first.
#[derive(Default)]
pub(super) struct Changes {
    /// In the order of [`GrowthPart::ALL`].
    by_part: [Vec<Change>; 4],
}

impl Changes {
    /// Keeps the owners of a part whose memory grew most.
    pub(super) fn set(&mut self, part: GrowthPart, mut changes: Vec<Change>) {
        changes.retain(|change| change.growth() > 0);
        changes.sort_by(|a, b| (b.growth(), &a.what).cmp(&(a.growth(), &b.what)));
        changes.truncate(SHOWN);
        self.by_part[part as usize] = changes;
    }

    /// Returns the owners of a part. Empty if none was searched for or found.
    pub(super) fn in_part(&self, part: GrowthPart) -> &[Change] {
        &self.by_part[part as usize]
    }

    pub(super) fn json(&self) -> Map<String, Value> {
        let list = |part| self.in_part(part).iter().map(Change::json).collect();
        GrowthPart::ALL.into_iter().map(|part| (part.key().to_owned(), list(part))).collect()
    }
}
