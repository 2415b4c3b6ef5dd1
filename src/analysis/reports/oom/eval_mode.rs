//! A forward in evaluation mode that keeps a graph.

use std::collections::BTreeMap;

use memtrace_trace::{Api, Category, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::module_calls::ModuleCalls;
use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::model_facts::{ModelFacts, is_inside, is_module, root_of};
use crate::state::replay::Replay;

/// The calls of a module in one forward, and the blocks that they allocated.
#[derive(Clone, Copy, Debug, Default)]
struct ModuleWork {
    calls: u64,
    blocks: u64,
}

/// Recognizes a forward in evaluation mode, in which dropout and batch norms allocate less than in training,
/// by the work of the modules in the current forward, and in the forwards before the latest backwards.
#[derive(Default)]
pub(super) struct ForwardModes {
    now: FxHashMap<Symbol, ModuleWork>,
    trained: FxHashMap<Symbol, ModuleWork>,
}

impl ForwardModes {
    /// Processes a row that the replay has already processed.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.phase == replay.phases.backward {
            // Most rows of a backward find the table empty. Draining an empty table would still clear it.
            if !self.now.is_empty() {
                self.trained.extend(self.now.drain());
            }
        } else if row.event == EventName::RangeBegin && *replay.symbols.get(row.api) == *Api::Module.as_str()
        {
            if !replay.symbols.get(row.name).contains('.') {
                self.now.clear();
            }
            self.now.entry(row.name).or_default().calls += 1;
        } else if row.event == EventName::Alloc && replay.phase == replay.phases.forward {
            self.now.entry(row.module).or_default().blocks += 1;
        }
    }

    /// Returns true if modules that depend on the mode allocated fewer blocks per call in the current forward
    /// than in training, and no module allocated more. `current` is the module of the latest row, whose call is
    /// not complete. `depends_on_mode` says whether the class of a module makes less in evaluation. A module of
    /// another class may allocate less for another reason, such as a workspace that exists already.
    pub(super) fn is_evaluation(
        &self,
        current: Symbol,
        symbols: &SymbolTable,
        depends_on_mode: impl Fn(Symbol) -> bool,
    ) -> bool {
        let current = symbols.get(current);
        let is_open = |path: &str| is_inside(&current, path);
        let mut is_less = false;
        for (module, now) in &self.now {
            let Some(trained) = self.trained.get(module).filter(|work| work.calls > 0) else { continue };
            if now.calls == 0 || is_open(&symbols.get(*module)) {
                continue;
            }
            match (now.blocks * trained.calls).cmp(&(trained.blocks * now.calls)) {
                std::cmp::Ordering::Greater => return false,
                std::cmp::Ordering::Less => is_less |= depends_on_mode(*module),
                std::cmp::Ordering::Equal => {}
            }
        }
        is_less
    }
}

/// A model whose latest call was in evaluation mode, and whose forward in this step keeps a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EvaluationGraph {
    pub(super) root: String,
    /// The bytes of its results.
    pub(super) bytes: i64,
}

impl EvaluationGraph {
    /// Returns the model with the most results among those that keep a graph in evaluation mode. `live` has the
    /// owner and the size of each live block. `has_autograd` is false if no graph exists.
    pub(super) fn find(
        live: &[(Owner, i64)],
        step: i64,
        calls: &ModuleCalls,
        facts: &ModelFacts,
        has_autograd: bool,
        symbols: &SymbolTable,
    ) -> Option<EvaluationGraph> {
        let mut roots: BTreeMap<String, (i64, FxHashSet<Symbol>)> = BTreeMap::new();
        for (owner, bytes) in live {
            let is_result = matches!(owner.category, Category::Activation | Category::AutogradDetail);
            let path = symbols.or_dash(owner.module);
            if is_result && owner.step == step && is_module(&path) {
                let found = roots.entry(root_of(&path).to_owned()).or_default();
                found.0 += bytes;
                found.1.insert(owner.module);
            }
        }
        // If only one model has results, the graph is the graph of this model.
        let is_alone = roots.len() == 1;
        let keeps = |root: &str, holding: &FxHashSet<Symbol>| {
            has_autograd
                && (is_alone
                    || calls.keep_graph_among(step, holding, |name| root_of(&symbols.get(name)) == root))
        };
        let of_evaluation = roots
            .into_iter()
            .filter(|(root, (_, holding))| facts.facts_at(root).evaluates && keeps(root, holding));
        let most = of_evaluation.max_by_key(|(_, (bytes, _))| *bytes);
        most.map(|(root, (bytes, _))| EvaluationGraph { root, bytes })
    }
}

/// Returns true for a class that allocates less in evaluation: `Dropout`, `BatchNorm2d` and the like.
pub(super) fn is_by_mode(class: &str) -> bool {
    ["Dropout", "BatchNorm"].iter().any(|name| class.contains(name))
}

#[cfg(test)]
mod tests {
    use memtrace_trace::memory::Metric;

    use super::*;
    use crate::options::Window;

    #[test]
    fn oom_recognizes_a_forward_in_evaluation_mode_by_its_fewer_blocks() {
        let symbols = SymbolTable::default();
        let (norm, linear, head) =
            (symbols.intern("Net.norm"), symbols.intern("Net.linear"), symbols.intern("Net.head"));
        let modes = |now: &[(Symbol, u64, u64)]| ForwardModes {
            now: now
                .iter()
                .map(|(path, calls, blocks)| (*path, ModuleWork { calls: *calls, blocks: *blocks }))
                .collect(),
            trained: [(norm, 6), (linear, 2), (head, 2)]
                .map(|(path, blocks)| (path, ModuleWork { calls: 2, blocks }))
                .into_iter()
                .collect(),
        };
        let is_evaluation =
            |now: &[(Symbol, u64, u64)]| modes(now).is_evaluation(head, &symbols, |module| module == norm);
        // A batch norm allocates 3 blocks per call in training, and 1 in evaluation.
        assert!(is_evaluation(&[(norm, 1, 1), (linear, 1, 1)]));
        assert!(!is_evaluation(&[(norm, 1, 3), (linear, 1, 1)]));
        // The call of the head is not complete; a module that allocates more than in training does other work.
        assert!(!is_evaluation(&[(norm, 1, 3), (linear, 1, 1), (head, 1, 0)]));
        assert!(!is_evaluation(&[(norm, 1, 1), (linear, 1, 2)]));
        // A linear layer that allocates less has found a workspace that an earlier call left.
        assert!(!is_evaluation(&[(norm, 1, 3), (linear, 1, 0)]));
        assert!(!is_evaluation(&[]));
        assert!(is_by_mode("BatchNorm2d") && is_by_mode("Dropout") && !is_by_mode("LayerNorm"));
    }

    #[test]
    fn oom_names_a_model_that_keeps_a_graph_in_evaluation_mode() {
        let symbols = SymbolTable::default();
        let mut calls = ModuleCalls::default();
        let mut facts = ModelFacts::default();
        let mut live = Vec::new();
        let row = |event, api: &str, name: &str| Record {
            event,
            api: symbols.intern(api),
            name: symbols.intern(name),
            ..Record::default()
        };
        let replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        for (root, count) in [("Vae.encoder", 9), ("Teacher", 3), ("Unet", 9)] {
            for index in 0..count {
                let path = format!("{root}.{index}");
                calls.feed(&row(EventName::RangeBegin, Api::Module.as_str(), &path), &replay);
                let module = symbols.intern(&path);
                let result = Record { module, category: Category::Activation, ..Record::default() };
                live.push((Owner { step: replay.step, ..Owner::from_row(&result) }, 100));
            }
        }
        for mark in ["mode=eval Vae.encoder", "mode=eval Teacher"] {
            facts.feed(&row(EventName::Mark, Api::ModelFact.as_str(), mark), &symbols);
        }
        let find = |live: &[(Owner, i64)], has_autograd| {
            EvaluationGraph::find(live, replay.step, &calls, &facts, has_autograd, &symbols)
        };
        let vae = EvaluationGraph { root: "Vae".to_owned(), bytes: 900 };
        assert_eq!(find(&live, true), Some(vae.clone()));
        assert_eq!(find(&live[..9], true), Some(vae));
        // No graph exists; the teacher holds a few results, as without a graph; a model in training.
        assert_eq!(find(&live, false), None);
        assert_eq!(find(&live[9..], true), None);
        assert_eq!(find(&live[12..], true), None);
        // The teacher alone has results, so the graph is its graph.
        let teacher = EvaluationGraph { root: "Teacher".to_owned(), bytes: 300 };
        assert_eq!(find(&live[9..12], true), Some(teacher));
    }
}
