//! Finds the calls of chosen modules, and the chosen modules that enclose a module.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::step::{RecordedStep, StepCall};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::categories::Phases;

/// The maximum number of levels of a module path that are examined. Real programs have fewer levels.
pub(super) const MOST_LEVELS: usize = 64;

/// Returns the calls of `modules` outside the backward, in order. A call inside another one is left out,
/// because the outer call includes it.
pub(super) fn outer_calls<'a>(
    step: &'a RecordedStep,
    modules: &FxHashSet<Symbol>,
    phases: &Phases,
) -> Vec<&'a StepCall> {
    outermost(step, |call| modules.contains(&call.name) && call.phase != phases.backward)
}

/// Returns the calls of `modules` in the backward, in order. These are second forwards, which a checkpoint
/// runs.
pub(super) fn calls_again<'a>(
    step: &'a RecordedStep,
    modules: &FxHashSet<Symbol>,
    phases: &Phases,
) -> Vec<&'a StepCall> {
    outermost(step, |call| modules.contains(&call.name) && call.phase == phases.backward)
}

fn outermost(step: &RecordedStep, is_chosen: impl Fn(&StepCall) -> bool) -> Vec<&StepCall> {
    let mut calls: Vec<&StepCall> =
        step.modules.iter().filter(|call| is_chosen(call) && call.from < call.to).collect();
    calls.sort_by_key(|call| (call.from, std::cmp::Reverse(call.to)));
    let mut end = 0;
    calls.retain(|call| {
        let is_outer = call.from >= end;
        end = end.max(call.to);
        is_outer
    });
    calls
}

/// Finds the called modules that enclose a module.
pub(super) struct ModulesAbove<'a> {
    symbols: &'a SymbolTable,
    called: FxHashMap<Arc<str>, Symbol>,
    /// The results of [`ModulesAbove::around`] so far.
    known: FxHashMap<Symbol, Vec<Symbol>>,
}

impl<'a> ModulesAbove<'a> {
    pub(super) fn new(calls: &[&StepCall], symbols: &'a SymbolTable) -> ModulesAbove<'a> {
        let called = calls.iter().map(|call| (symbols.get(call.name), call.name)).collect();
        ModulesAbove { symbols, called, known: FxHashMap::default() }
    }

    /// Returns the called modules that enclose `module`, outermost first, and `module` itself if it is one of
    /// them.
    pub(super) fn around(&mut self, module: Symbol) -> &[Symbol] {
        self.known.entry(module).or_insert_with(|| {
            let path = self.symbols.get(module);
            let ends = path.match_indices('.').map(|(end, _)| end).take(MOST_LEVELS).chain([path.len()]);
            ends.filter_map(|end| self.called.get(&path[..end]).copied()).collect()
        })
    }
}
