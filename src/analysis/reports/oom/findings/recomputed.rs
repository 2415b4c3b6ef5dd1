//! Activations that a checkpoint recomputes for its backward.

use std::collections::BTreeSet;

use memtrace_trace::Category;
use memtrace_trace::units::Unit;
use rustc_hash::FxHashMap;

use super::super::finding::OomCase;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::module_layers::Layers;

pub(super) fn remedy(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    let replay = &case.oom_state.replayed.replay;
    let layers = replay.classes.layers([], case.oom_state.symbols());
    let bytes =
        recomputed(case.live.iter().copied(), replay.phases.backward, case.oom_state.symbols(), &layers);
    (4 * bytes >= case.evidence.torch.allocated.max(1)).then(|| {
        "checkpoint each layer by itself: a checkpoint around several recomputes all of them at once"
            .to_owned()
    })
}

/// Returns the live bytes that one checkpoint around several repeated layers has recomputed; 0 if each layer
/// has its own checkpoint.
///
/// `live` has the owner and the size of each block. A checkpoint runs its forward inside the backward, so its
/// activations belong to the backward phase.
fn recomputed(
    live: impl Iterator<Item = (Owner, i64)>,
    backward: Symbol,
    symbols: &SymbolTable,
    layers: &Layers,
) -> i64 {
    let mut groups: FxHashMap<String, (BTreeSet<String>, i64)> = FxHashMap::default();
    for (owner, size) in live {
        if owner.category != Category::Activation || owner.phase != backward {
            continue;
        }
        let module = symbols.get(owner.module).to_string();
        let joined = layers.joined(&module);
        let Some(depth) = joined.split('.').position(|name| name == "*") else { continue };
        let parent = module.split('.').take(depth).collect::<Vec<_>>().join(".");
        let (found, bytes) = groups.entry(parent).or_default();
        found.extend(module.split('.').nth(depth).map(str::to_owned));
        *bytes += size;
    }
    let several = groups.into_values().filter(|(found, _)| found.len() > 1);
    several.map(|(_, bytes)| bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::read::record::Record;

    #[test]
    fn oom_one_checkpoint_around_several_layers_differs_from_one_for_each() {
        let symbols = SymbolTable::default();
        let backward = symbols.intern("backward");
        let paths = ["GPT", "GPT.blocks.0", "GPT.blocks.1", "GPT.blocks.2"];
        let classes: Vec<_> =
            paths.iter().map(|path| (*path, Some(if *path == "GPT" { "GPT" } else { "Block" }))).collect();
        let layers = Layers::find(&classes);
        let block = |module: &str, phase: &str| Owner {
            module: symbols.intern(module),
            phase: symbols.intern(phase),
            category: Category::Activation,
            ..Owner::from_row(&Record::default())
        };
        let bytes =
            |live: &[Owner]| recomputed(live.iter().map(|owner| (*owner, 100)), backward, &symbols, &layers);
        let one =
            [block("GPT.blocks.2", "backward"), block("GPT.blocks.2", "backward"), block("GPT", "backward")];
        assert_eq!(bytes(&one), 0);
        let several = [block("GPT.blocks.1", "backward"), block("GPT.blocks.2", "backward")];
        assert_eq!(bytes(&several), 200);
        assert_eq!(bytes(&[block("GPT.blocks.1", "forward"), block("GPT.blocks.2", "forward")]), 0);
    }

    /// A backward fails in which layers have results of 6 GiB each that were made in this phase.
    fn trace(phase: &str, layers: &[&str]) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        for layer in ["Net.h.0", "Net.h.1"] {
            trace.call(layer, "Block", 0);
        }
        for layer in layers {
            trace.block(6 * GIB, Row { category: Category::Activation, ..owner(layer, phase, 0) });
        }
        trace.fill(512 * MIB, owner("Net.h.0", "forward", 0));
        trace.fails(GIB, owner("Net.h.0", "backward", 0));
        trace
    }

    #[test]
    fn oom_advises_a_checkpoint_for_each_layer() {
        let remedy = "try: checkpoint each layer by itself: a checkpoint around several recomputes all of them at once";
        trace("backward", &["Net.h.0", "Net.h.1"]).prints(&[remedy]);
        trace("backward", &["Net.h.0"]).never_prints(remedy);
        trace("forward", &["Net.h.0", "Net.h.1"]).never_prints(remedy);
    }
}
