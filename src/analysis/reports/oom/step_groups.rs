//! The memory of a step by op and module, compared with earlier steps.

use std::collections::VecDeque;

use memtrace_trace::units::Unit;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::module_layers::Layers;

/// The number of latest steps that are kept for the comparison.
const MOST_STEPS: usize = 16;
/// The maximum number of groups that are tracked per step.
const MOST_GROUPS: usize = 20_000;
/// The number of differences that are shown.
const SHOWN: usize = 3;
/// Differences below this part of the card, one in 20, are left out.
const LEAST_PART: i64 = 20;

/// The columns that [`StepGroups::feed`] reads of every row.
pub(super) const COLUMNS: Columns = Columns::of(&["op", "module", "category", "delta_bytes"]);

type Group = (Symbol, Symbol);

/// The live bytes by op and module, and the maximum of each group in the latest steps.
#[derive(Default)]
struct Peaks {
    now: FxHashMap<Group, i64>,
    most: FxHashMap<Group, i64>,
    steps: VecDeque<FxHashMap<Group, i64>>,
}

impl Peaks {
    fn next_step(&mut self, is_loading: bool) {
        let most = std::mem::take(&mut self.most);
        if !is_loading {
            self.steps.push_back(most);
        }
        if self.steps.len() > MOST_STEPS {
            self.steps.pop_front();
        }
        self.now.retain(|_, bytes| *bytes != 0);
        self.most.clone_from(&self.now);
    }

    fn add(&mut self, group: Group, bytes: i64) {
        if !self.now.contains_key(&group) && self.now.len() >= MOST_GROUPS {
            return;
        }
        let now = self.now.entry(group).or_default();
        *now = now.saturating_add(bytes);
        let most = self.most.entry(group).or_default();
        *most = (*most).max(*now);
    }

    fn median(&self, group: Group) -> i64 {
        let mut before: Vec<i64> =
            self.steps.iter().map(|step| step.get(&group).copied().unwrap_or(0)).collect();
        before.sort_unstable();
        before.get(before.len() / 2).copied().unwrap_or(0)
    }
}

/// The memory that ops and modules held in the steps of a device.
pub(super) struct StepGroups {
    /// The current step; -1 before the first.
    step: i64,
    all: Peaks,
    /// Inputs, and other tensors of the script outside of modules.
    inputs: Peaks,
}

/// A group that holds more than in earlier steps; sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    op: String,
    module: String,
    bytes: i64,
    /// The median of the group's maximum in the earlier steps.
    usual: i64,
}

impl Difference {
    /// Returns the difference as text, such as ``1.17 GiB of aten::abs in Net.loss, 89.65 MiB in the median
    /// step``.
    pub(super) fn line(&self, units: Unit) -> String {
        let Difference { op, module, bytes, usual } = self;
        format!("{} of {op} in {module}, {} in the median step", units.show(*bytes), units.show(*usual))
    }

    pub(super) fn json(&self) -> Value {
        json!({ "op": self.op, "module": self.module, "bytes": self.bytes, "usual_bytes": self.usual })
    }
}

impl Default for StepGroups {
    fn default() -> Self {
        StepGroups { step: -1, all: Peaks::default(), inputs: Peaks::default() }
    }
}

impl StepGroups {
    /// Processes a row of the device that the replay has already processed. `step` is the current step.
    pub(super) fn feed(&mut self, row: &Record, step: i64) {
        if step > self.step {
            self.all.next_step(self.step < 0);
            self.inputs.next_step(self.step < 0);
            self.step = step;
        }
        let counts =
            matches!(row.event, EventName::Alloc | EventName::Free | EventName::Tag | EventName::Live);
        // Most blocks of a step without detail have no rows, so the step cannot be compared.
        if !counts || row.status != 0 || row.op == Symbol::WITHOUT_DETAIL {
            return;
        }
        self.all.add((row.op, row.module), row.delta_bytes);
        if matches!(row.category, Category::Input | Category::Script) {
            self.inputs.add((row.op, row.module), row.delta_bytes);
        }
    }

    /// Returns the groups whose memory exceeds their usual memory most. The `request` bytes of the request
    /// that failed count for its group. Repeated layers count as one group.
    pub(super) fn differences(
        &self,
        failed: &Record,
        request: i64,
        symbols: &SymbolTable,
        layers: &Layers,
        capacity: i64,
    ) -> Vec<Difference> {
        let mut joined: FxHashMap<(String, String), (i64, i64)> = FxHashMap::default();
        let asked = (failed.op, failed.module);
        for group in self.all.now.keys().chain((!self.all.now.contains_key(&asked)).then_some(&asked)) {
            let more = if *group == asked { request } else { 0 };
            let now = self.all.now.get(group).copied().unwrap_or(0).saturating_add(more);
            let name = (symbols.or_dash(group.0).to_string(), layers.joined(&symbols.or_dash(group.1)));
            let sums = joined.entry(name).or_default();
            *sums = (sums.0.saturating_add(now), sums.1.saturating_add(self.all.median(*group)));
        }
        let mut all: Vec<Difference> = joined
            .into_iter()
            .map(|((op, module), (bytes, usual))| Difference { op, module, bytes, usual })
            .filter(|each| (each.bytes - each.usual).saturating_mul(LEAST_PART) >= capacity.max(1))
            .collect();
        all.sort_by(|a, b| (b.bytes - b.usual, &a.op, &a.module).cmp(&(a.bytes - a.usual, &b.op, &b.module)));
        all.truncate(SHOWN);
        // A larger input may cause all other differences, although it is too small to be listed itself. So
        // add the input that grew by the largest factor.
        let inputs = self.inputs.now.iter().map(|(group, bytes)| Difference {
            op: symbols.or_dash(group.0).to_string(),
            module: symbols.or_dash(group.1).to_string(),
            bytes: *bytes,
            usual: self.inputs.median(*group),
        });
        let is_new =
            |each: &Difference| all.iter().all(|one| (&one.op, &one.module) != (&each.op, &each.module));
        let grown = inputs.filter(|each| each.usual > 0 && 2 * each.bytes > 3 * each.usual && is_new(each));
        let most =
            grown.max_by_key(|each| (100 * each.bytes / each.usual, each.op.clone(), each.module.clone()));
        all.extend(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: i64 = 1 << 20;

    fn row(symbols: &SymbolTable, op: &str, bytes: i64, category: Category) -> Record {
        let event = if bytes < 0 { EventName::Free } else { EventName::Alloc };
        Record {
            event,
            op: symbols.intern(op),
            module: symbols.intern("Net.loss"),
            delta_bytes: bytes,
            category,
            ..Record::default()
        }
    }

    #[test]
    fn oom_compares_a_step_with_the_median_of_those_before() {
        let symbols = SymbolTable::default();
        let mut groups = StepGroups::default();
        for (step, boxes) in [1, 2, 3, 2, 40].into_iter().enumerate() {
            let mut feed = |op: &str, bytes: i64, category| {
                groups.feed(&row(&symbols, op, bytes, category), step as i64)
            };
            feed("aten::rand", boxes * 1024, Category::Input);
            feed("aten::abs", boxes * 10 * MIB, Category::Activation);
            feed("aten::mm", 300 * MIB, Category::Activation);
            if step < 4 {
                feed("aten::rand", -boxes * 1024, Category::Input);
                feed("aten::abs", -boxes * 10 * MIB, Category::Activation);
                feed("aten::mm", -300 * MIB, Category::Activation);
            }
        }
        let failed = row(&symbols, "aten::sum", 0, Category::Activation);
        let found = groups.differences(&failed, 100 * MIB, &symbols, &Layers::default(), 1000 * MIB);
        let text: Vec<String> = found.iter().map(|each| each.line(Unit::default())).collect();
        assert_eq!(
            text,
            [
                "400.00 MiB of aten::abs in Net.loss, 20.00 MiB in the median step",
                "100.00 MiB of aten::sum in Net.loss, 0 B in the median step",
                "40.00 KiB of aten::rand in Net.loss, 2.00 KiB in the median step"
            ]
        );
    }
}
