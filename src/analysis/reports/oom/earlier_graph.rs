//! Graphs of an earlier step that the running step still needs.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::Category;

use super::limits::MATERIAL;
use super::module_calls::ModuleCalls;
use crate::read::symbols::SymbolTable;
use crate::state::block::Owner;
use crate::state::model_facts::{is_module, root_of};

/// Returns the earlier steps whose live results belong mostly to a model that step `now` has not called. A step counts
/// only if these results are a significant share of the live memory. `live` has the owner and the size of each live
/// block.
///
/// Such a graph may be needed: a program with two optimizers steps one of them between the forward of a generator and
/// its backward.
pub(super) fn continued_steps(
    live: &[(Owner, i64)],
    now: i64,
    calls: &ModuleCalls,
    symbols: &SymbolTable,
) -> BTreeSet<i64> {
    let mut results: BTreeMap<(i64, String), i64> = BTreeMap::new();
    for (owner, bytes) in live {
        let path = symbols.or_dash(owner.module);
        let is_result = matches!(owner.category, Category::Activation | Category::AutogradDetail);
        if is_result && (0..now).contains(&owner.step) {
            let sum = results.entry((owner.step, root_of(&path).to_owned())).or_default();
            *sum = sum.saturating_add(*bytes);
        }
    }
    let mut most: BTreeMap<i64, (i64, &str)> = BTreeMap::new();
    for ((step, root), bytes) in &results {
        let known = most.entry(*step).or_default();
        *known = (*known).max((*bytes, root));
    }
    let is_continued =
        |root: &str| is_module(root) && calls.last_step(root, symbols).is_some_and(|last| last < now);
    let all = live.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let counts = |(_, (bytes, root)): &(i64, (i64, &str))| {
        *bytes as f64 >= MATERIAL * all as f64 && is_continued(root)
    };
    most.into_iter().filter(counts).map(|(step, _)| step).collect()
}

#[cfg(test)]
mod tests {
    use memtrace_trace::memory::Metric;

    use super::super::test_evidence::call;
    use super::*;
    use crate::options::Window;
    use crate::read::record::Record;
    use crate::state::replay::Replay;

    #[test]
    fn oom_sees_that_a_step_continues_the_graph_of_another_model() {
        let symbols = SymbolTable::default();
        let mut replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        let mut calls = ModuleCalls::default();
        for (path, step) in [("Generator", 2), ("Critic", 3)] {
            replay.step = step;
            call(&mut calls, &replay, path, 0);
        }
        let block = |path: &str, step: i64, bytes: i64| {
            let row =
                Record { module: symbols.intern(path), category: Category::Activation, ..Record::default() };
            (Owner { step, ..Owner::from_row(&row) }, bytes)
        };
        let fake = block("Generator.body.3", 2, 900);
        let of = |live: &[(Owner, i64)], now: i64| continued_steps(live, now, &calls, &symbols);
        assert_eq!(of(&[fake, block("Critic.body.0", 2, 100)], 3), BTreeSet::from([2]));
        // Step 3 has called the critic again, so its earlier graph is no longer needed.
        assert_eq!(of(&[block("Critic.body.0", 2, 900)], 3), BTreeSet::new());
        // No model is known; the same step.
        assert_eq!(of(&[block("(script)", 2, 900)], 3), BTreeSet::new());
        assert_eq!(of(&[fake], 2), BTreeSet::new());
    }
}
