//! The calls of modules before an OOM.

use memtrace_trace::{Api, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::model_facts::{is_inside, root_of};
use crate::state::replay::Replay;

/// The minimum number of modules with live results that show a graph. Without one, a model with skip
/// connections keeps a few results, too.
const FEWEST_HOLDING: usize = 8;

/// The calls of one module.
struct CallsOfModule {
    count: u64,
    /// The step of the last call, and the `seq` of the first and the last call in this step.
    step: i64,
    first: i64,
    last: i64,
}

/// The calls of each called module.
#[derive(Default)]
pub(super) struct ModuleCalls {
    by_module: FxHashMap<Symbol, CallsOfModule>,
    module_api: Option<Symbol>,
    /// The `seq` of the last call of a root.
    pub(super) last_root: i64,
}

impl ModuleCalls {
    /// Processes a row that the replay has already processed.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if row.event != EventName::RangeBegin {
            return;
        }
        let module_api = *self.module_api.get_or_insert_with(|| replay.symbols.intern(Api::Module.as_str()));
        if row.api == module_api {
            let none = CallsOfModule { count: 0, step: i64::MIN, first: 0, last: 0 };
            let calls = self.by_module.entry(row.name).or_insert(none);
            if calls.step != replay.step {
                (calls.step, calls.first) = (replay.step, row.seq);
            }
            calls.last = row.seq;
            calls.count += 1;
            if !replay.symbols.get(row.name).contains('.') {
                self.last_root = row.seq;
            }
        }
    }

    /// Whether at least 8 of the called modules, and a third of them, still hold results. Only a graph keeps
    /// so many. `holding` has the modules of the live results of the step.
    pub(super) fn keep_graph(&self, step: i64, holding: &FxHashSet<Symbol>) -> bool {
        self.keep_graph_among(step, holding, |_| true)
    }

    /// Does the same as [`ModuleCalls::keep_graph`], but counts only the called modules that `counts` selects.
    pub(super) fn keep_graph_among(
        &self,
        step: i64,
        holding: &FxHashSet<Symbol>,
        counts: impl Fn(Symbol) -> bool,
    ) -> bool {
        let called = self.by_module.iter();
        let called = called.filter(|(name, calls)| calls.step == step && counts(**name)).count();
        let is_called = |module: &&Symbol| self.by_module.get(module).is_some_and(|calls| calls.step == step);
        let hold = holding.iter().filter(is_called).count();
        hold >= FEWEST_HOLDING && 3 * hold >= called
    }

    /// Returns the number of calls of a module.
    pub(super) fn of_module(&self, path: &str, symbols: &SymbolTable) -> u64 {
        let mut all = self.by_module.iter();
        all.find(|(name, _)| *symbols.get(**name) == *path).map_or(0, |(_, calls)| calls.count)
    }

    /// Returns the `seq` of the first and the last call of the module at `path`, or of a module inside it, in a step.
    pub(super) fn calls_of(&self, path: &str, step: i64, symbols: &SymbolTable) -> Option<(i64, i64)> {
        let is_of_path = |name: Symbol| is_inside(&symbols.get(name), path);
        let called = self.by_module.iter().filter(|(name, calls)| calls.step == step && is_of_path(**name));
        called
            .map(|(_, calls)| (calls.first, calls.last))
            .reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
    }

    /// Returns the step of the last call of a module of a root; `None` if none was called.
    pub(super) fn last_step(&self, root: &str, symbols: &SymbolTable) -> Option<i64> {
        let of_root = self.by_module.iter().filter(|(name, _)| root_of(&symbols.get(**name)) == root);
        of_root.map(|(_, calls)| calls.step).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_sees_a_graph_in_the_results_that_most_modules_keep() {
        let symbols = SymbolTable::default();
        let modules: Vec<Symbol> = (0..24).map(|index| symbols.intern(&format!("Net.{index}"))).collect();
        let twice = CallsOfModule { count: 2, step: 3, first: 0, last: 0 };
        let by_module = modules.iter().map(|module| (*module, CallsOfModule { ..twice })).collect();
        let calls = ModuleCalls { by_module, ..ModuleCalls::default() };
        let first = |count: usize| modules[..count].iter().copied().collect();
        assert!(calls.keep_graph(3, &first(16)));
        // Without a graph, skip connections keep the results of a few modules. Modules of earlier steps do
        // not count.
        assert!(!calls.keep_graph(3, &first(7)));
        assert!(!calls.keep_graph(4, &first(16)));
        assert!(!calls.keep_graph(3, &FxHashSet::default()));
    }
}
