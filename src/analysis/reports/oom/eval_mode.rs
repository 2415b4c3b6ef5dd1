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

    /// Returns true if modules of the current forward allocated fewer blocks per call than in training, and
    /// none allocated more. `current` is the module of the latest row, whose call is not complete.
    pub(super) fn is_evaluation(&self, current: Symbol, symbols: &SymbolTable) -> bool {
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
                std::cmp::Ordering::Less => is_less = true,
                std::cmp::Ordering::Equal => {}
            }
        }
        is_less
    }
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
        let is_evaluation = |now: &[(Symbol, u64, u64)]| modes(now).is_evaluation(head, &symbols);
        // A batch norm allocates 3 blocks per call in training, and 1 in evaluation.
        assert!(is_evaluation(&[(norm, 1, 1), (linear, 1, 1)]));
        assert!(!is_evaluation(&[(norm, 1, 3), (linear, 1, 1)]));
        // The call of the head is not complete; a module that allocates more than in training does other work.
        assert!(!is_evaluation(&[(norm, 1, 3), (linear, 1, 1), (head, 1, 0)]));
        assert!(!is_evaluation(&[(norm, 1, 1), (linear, 1, 2)]));
        assert!(!modes(&[]).is_evaluation(head, &symbols));
    }
}
