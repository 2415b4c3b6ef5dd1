//! Models whose parameters stay on the GPU although this step does not train them.

use memtrace_trace::{Api, Category, EventName};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::model_facts::{ModelFacts, is_inside, is_module, root_of};
use crate::state::replay::Replay;

/// The minimum number of modules with live results that show a graph. Without one, a model with skip
/// connections keeps a few results, too.
const FEWEST_HOLDING: usize = 8;

/// For each called module: the number of its calls, the step of the last one, and the `seq` of the first and the last
/// one in this step.
#[derive(Default)]
pub(super) struct ModuleCalls {
    of: FxHashMap<Symbol, (u64, i64, i64, i64)>,
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
            let (calls, step, first, last) = self.of.entry(row.name).or_insert((0, i64::MIN, 0, 0));
            if *step != replay.step {
                (*step, *first) = (replay.step, row.seq);
            }
            *last = row.seq;
            *calls += 1;
            if !replay.symbols.get(row.name).contains('.') {
                self.last_root = row.seq;
            }
        }
    }

    /// Returns true if so many of the modules that a step has called still hold results of their own that a
    /// graph must keep them: without a graph, the next module's results replace them. `holding` has the modules
    /// of the live results of the step.
    pub(super) fn keep_graph(&self, step: i64, holding: &BTreeSet<Symbol>) -> bool {
        self.keep_graph_among(step, holding, |_| true)
    }

    /// Does the same as [`ModuleCalls::keep_graph`], but counts only the called modules that `counts` selects.
    pub(super) fn keep_graph_among(
        &self,
        step: i64,
        holding: &BTreeSet<Symbol>,
        counts: impl Fn(Symbol) -> bool,
    ) -> bool {
        let called = self.of.iter().filter(|(name, (_, last, ..))| *last == step && counts(**name)).count();
        let hold =
            holding.iter().filter(|module| self.of.get(module).is_some_and(|(_, last, ..)| *last == step));
        let hold = hold.count();
        hold >= FEWEST_HOLDING && 3 * hold >= called
    }

    /// Returns the number of calls of a module.
    pub(super) fn of_module(&self, path: &str, symbols: &SymbolTable) -> u64 {
        self.of.iter().find(|(name, _)| *symbols.get(**name) == *path).map_or(0, |(_, (calls, ..))| *calls)
    }

    /// Returns the `seq` of the first and the last call of the module at `path`, or of a module inside it, in a step.
    pub(super) fn calls_of(&self, path: &str, step: i64, symbols: &SymbolTable) -> Option<(i64, i64)> {
        let is_of_path = |name: Symbol| is_inside(&symbols.get(name), path);
        let called = self.of.iter().filter(|(name, (_, last, ..))| *last == step && is_of_path(**name));
        called
            .map(|(_, (.., first, last))| (*first, *last))
            .reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
    }

    /// Returns the step of the last call of a module of a root; `None` if none was called.
    pub(super) fn last_step(&self, root: &str, symbols: &SymbolTable) -> Option<i64> {
        let of_root = self.of.iter().filter(|(name, _)| root_of(&symbols.get(**name)) == root);
        of_root.map(|(_, (_, step, ..))| *step).max()
    }
}

/// A model that this step does not train, and whose parameters are a significant share of the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UntrainedModel {
    /// The path of the root.
    pub(super) root: String,
    /// The bytes of its live parameters and buffers.
    pub(super) bytes: i64,
    /// True if this step has called it.
    pub(super) is_called: bool,
    /// The step of its last call; `None` if it was never called.
    pub(super) last_step: Option<i64>,
    /// True if most of its parameters have 16 bits or fewer.
    pub(super) is_half: bool,
}

impl UntrainedModel {
    /// Returns the models other than the one of the request (`module`) that are not trained, the largest first.
    /// `live` has the owner and the bytes of each live block, `is_material` says whether a size matters.
    pub(super) fn find(
        live: &[(Owner, i64)],
        module: &str,
        step: i64,
        calls: &ModuleCalls,
        facts: &ModelFacts,
        symbols: &SymbolTable,
        is_material: impl Fn(i64) -> bool,
    ) -> Vec<UntrainedModel> {
        // For each root: the bytes of its parameters and buffers, and whether it is trained.
        let mut roots: BTreeMap<String, (i64, bool)> = BTreeMap::new();
        for (owner, bytes) in live {
            let path = symbols.get(owner.module);
            let found = roots.entry(root_of(&path).to_owned()).or_default();
            match owner.category.without_sharding() {
                Category::Parameter | Category::Buffer => found.0 += bytes,
                Category::Gradient | Category::OptimizerState => found.1 = true,
                _ => {}
            }
        }
        let other = |(root, (bytes, is_trained)): (String, (i64, bool))| {
            let is_other = !is_trained && root != root_of(module) && is_module(&root);
            (is_other && is_material(bytes)).then_some((root, bytes))
        };
        let model = |(root, bytes): (String, i64)| {
            let last_step = calls.last_step(&root, symbols);
            let of_model = facts.of(&root);
            UntrainedModel {
                bytes,
                is_called: last_step.is_some_and(|last| last >= step),
                last_step,
                is_half: of_model.is_half,
                root,
            }
        };
        let is_sure = |model: &UntrainedModel| {
            let of_model = facts.of(&model.root);
            !model.is_called || of_model.evaluates || of_model.trained == Some(0)
        };
        let mut all: Vec<UntrainedModel> =
            roots.into_iter().filter_map(other).map(model).filter(is_sure).collect();
        all.sort_by_key(|model| std::cmp::Reverse(model.bytes));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_sees_a_graph_in_the_results_that_most_modules_keep() {
        let symbols = SymbolTable::default();
        let modules: Vec<Symbol> = (0..24).map(|index| symbols.intern(&format!("Net.{index}"))).collect();
        let of = modules.iter().map(|module| (*module, (2, 3, 0, 0))).collect();
        let calls = ModuleCalls { of, ..ModuleCalls::default() };
        let first = |count: usize| modules[..count].iter().copied().collect();
        assert!(calls.keep_graph(3, &first(16)));
        // Without a graph, skip connections keep the results of a few modules. Modules of earlier steps do
        // not count.
        assert!(!calls.keep_graph(3, &first(7)));
        assert!(!calls.keep_graph(4, &first(16)));
        assert!(!calls.keep_graph(3, &BTreeSet::new()));
    }

    #[test]
    fn oom_names_a_model_that_the_step_does_not_train() {
        let symbols = SymbolTable::default();
        let owner = |module: &str, category| Owner {
            module: symbols.intern(module),
            category,
            ..Owner::of(&Record::default())
        };
        let mut calls = ModuleCalls::default();
        calls.of.insert(symbols.intern("Teacher.layer"), (3, 4, 0, 0));
        calls.of.insert(symbols.intern("Student"), (3, 5, 0, 0));
        calls.of.insert(symbols.intern("Reference"), (3, 5, 0, 0));
        let live = [
            (owner("Teacher.layer", Category::Parameter), 300),
            (owner("Student.layer", Category::Parameter), 300),
            (owner("Reference", Category::Parameter), 200),
            (owner("Critic", Category::Parameter), 300),
            (owner("Critic", Category::OptimizerState), 300),
            (owner("Small", Category::Parameter), 1),
            (owner("(script)", Category::Parameter), 300),
        ];
        let mut facts = ModelFacts::default();
        let mut find = |mark: &str| {
            let row = Record {
                event: EventName::Mark,
                api: symbols.intern("model_fact"),
                name: symbols.intern(mark),
                ..Record::default()
            };
            facts.feed(&row, &symbols);
            let is_material = |bytes: i64| bytes >= 100;
            UntrainedModel::find(&live, "Student.layer", 5, &calls, &facts, &symbols, is_material)
        };
        let teacher = UntrainedModel {
            root: "Teacher".to_owned(),
            bytes: 300,
            is_called: false,
            last_step: Some(4),
            is_half: false,
        };
        // A model that this step has called may be trained, unless a mark says that it is not.
        assert_eq!(find("type=bfloat16 Other"), std::slice::from_ref(&teacher));
        let found = find("mode=eval Reference");
        assert_eq!(found[0], teacher);
        assert_eq!((&*found[1].root, found[1].is_called), ("Reference", true));
    }
}
