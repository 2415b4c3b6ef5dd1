//! Recognizes a forward in evaluation mode, in which dropout and batch norms allocate less than in training.

use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::Replay;

/// The calls of a module in one forward, and the blocks that they allocated.
#[derive(Clone, Copy, Debug, Default)]
struct ModuleWork {
    calls: u64,
    blocks: u64,
}

/// The work of the modules in the current forward, and in the forwards before the latest backwards.
#[derive(Default)]
pub(super) struct ForwardModes {
    now: FxHashMap<Symbol, ModuleWork>,
    trained: FxHashMap<Symbol, ModuleWork>,
}

impl ForwardModes {
    /// Processes a row that the replay has already processed.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.phase == replay.phases.backward {
            self.trained.extend(self.now.drain());
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
        let is_open = |path: &str| {
            current.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
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

/// Returns true for a class that allocates less in evaluation: `Dropout`, `BatchNorm2d` and the like.
pub(super) fn is_by_mode(class: &str) -> bool {
    ["Dropout", "BatchNorm"].iter().any(|name| class.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
