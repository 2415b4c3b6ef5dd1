//! The memory of a model that FSDP shards: what it gathers, and what it has not reduced.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::Category;

use super::cause::Facts;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::{Block, Owner};
use crate::state::module_layers::is_number;

/// The minimum number of layers whose whole parameters are live together if FSDP does not reshard them after their
/// forward. If it does, at most three are: the layer that runs, the next one, and one that is being freed.
const FEWEST_GATHERED_MODULES: usize = 4;

/// Returns the bytes of the whole gradients that FSDP has not reduced, and the number of their layers. A gradient belongs
/// to a module inside its layer, such as `Net.layers.3.mlp.up`, so the layer is the first part with a number.
///
/// `earlier` has the phase of the backward if none runs and the model is sharded: what a backward has left is then a
/// gradient, whose category is known only when it is reduced.
pub(super) fn unreduced(
    live: &[(Owner, i64)],
    earlier: Option<Symbol>,
    symbols: &SymbolTable,
) -> (i64, usize) {
    let is_gradient = |owner: &Owner| {
        owner.category == Category::UnshardedGradient
            || owner.category == Category::Temporary && Some(owner.phase) == earlier
    };
    let layer = |path: &str| {
        let mut names = path.split('.');
        let mut layer = names.next()?.to_owned();
        for name in names {
            let parent = layer.clone();
            layer = format!("{layer}.{name}");
            if is_number(name) {
                return Some((parent, layer));
            }
        }
        None
    };
    let mut parents: BTreeMap<String, (i64, BTreeSet<String>)> = BTreeMap::new();
    for (owner, size) in live.iter().filter(|(owner, _)| is_gradient(owner)) {
        if let Some((parent, layer)) = layer(&symbols.get(owner.module)) {
            let (bytes, layers) = parents.entry(parent).or_default();
            *bytes += size;
            layers.insert(layer);
        }
    }
    most_layers(parents)
}

/// Returns the bytes and the number of layers of the parent with most layers. `parents` has these layers and their bytes
/// for each parent.
fn most_layers<T>(parents: BTreeMap<String, (i64, BTreeSet<T>)>) -> (i64, usize) {
    let counts = parents.into_values().map(|(bytes, layers)| (bytes, layers.len()));
    counts.max_by_key(|(_, layers)| *layers).unwrap_or_default()
}

/// Returns the bytes of the blocks of a category, such as the whole parameters that FSDP has gathered, and the number of
/// their layers. Only numbered layers below one parent count (`Net.layers.3`), not the root, which FSDP keeps by design,
/// and not the single linear layers that DeepSpeed gathers.
pub(super) fn modules_of(live: &[Block], category: Category, symbols: &SymbolTable) -> (i64, usize) {
    let mut parents: BTreeMap<String, (i64, BTreeSet<usize>)> = BTreeMap::new();
    for block in live.iter().filter(|block| block.owner.category == category) {
        let module = symbols.get(block.owner.module);
        let layer = module.rsplit_once('.').filter(|(_, name)| is_number(name));
        if let Some((parent, _)) = layer {
            let (bytes, layers) = parents.entry(parent.to_owned()).or_default();
            *bytes += block.bytes;
            layers.insert(block.owner.module.index());
        }
    }
    most_layers(parents)
}

impl Facts {
    /// Returns the bytes of the block into which FSDP has gathered most of the model's parameters at once, if there
    /// is one and it is a significant share of the card. `ranks` is the number of ranks that share the model.
    pub(super) fn whole_gather(&self, ranks: i32) -> Option<i64> {
        let model = self.shards.saturating_mul(i64::from(ranks));
        // With mixed precision, gathered parameters are half as large as the shards. A layer that is gathered by
        // itself has its own block, even if it stays gathered (`reshard_after_forward=False`).
        let is_whole =
            self.largest_gather > 0 && self.largest_gather.saturating_mul(5) >= model.saturating_mul(2);
        (is_whole && self.is_material(self.largest_gather)).then_some(self.largest_gather)
    }

    /// Returns the bytes and the number of the modules whose whole parameters are live together, if they are a
    /// significant share of the card.
    pub(super) fn gathered_together(&self) -> Option<(i64, usize)> {
        self.many_layers(self.gathered_modules)
    }

    /// Returns the bytes and the number of the modules whose whole gradients are live together, if they are a
    /// significant share of the card. FSDP reduces each to a shard as soon as the module's backward ends, except
    /// under `no_sync()`.
    pub(super) fn unreduced_together(&self) -> Option<(i64, usize)> {
        self.many_layers(self.unreduced_modules)
    }

    /// Returns `of`, bytes and the number of their layers, if both are more than a sharded model needs at once.
    fn many_layers(&self, of: (i64, usize)) -> Option<(i64, usize)> {
        Some(of).filter(|(bytes, layers)| *layers >= FEWEST_GATHERED_MODULES && self.is_material(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_facts::GIB;
    use super::*;
    use crate::read::record::Record;

    #[test]
    fn oom_counts_the_layers_whose_gradients_are_whole() {
        let symbols = SymbolTable::default();
        let blocks = |paths: &[&str], category: Category| -> Vec<(Owner, i64)> {
            let block = |path: &&str| {
                let row = Record { module: symbols.intern(path), category, ..Record::default() };
                (Owner::of(&row), 100)
            };
            paths.iter().map(block).collect()
        };
        let linear =
            ["Net.layers.0.up", "Net.layers.0.down", "Net.layers.1.mlp.0", "Net.layers.2", "Net.head"];
        let whole = blocks(&linear, Category::UnshardedGradient);
        assert_eq!(unreduced(&whole, None, &symbols), (400, 3));
        assert_eq!(unreduced(&blocks(&["Net.head"], Category::UnshardedGradient), None, &symbols), (0, 0));
        // Gradients of an earlier backward have no category yet.
        let left = blocks(&linear, Category::Temporary);
        assert_eq!(unreduced(&left, Some(left[0].0.phase), &symbols), (400, 3));
        assert_eq!(unreduced(&left, None, &symbols), (0, 0));
    }

    #[test]
    fn oom_sees_that_fsdp_keeps_the_whole_gradients_of_several_modules() {
        let together = |bytes, modules| {
            Facts { capacity: 24 * GIB, unreduced_modules: (bytes, modules), ..Facts::default() }
                .unreduced_together()
        };
        assert_eq!(together(8 * GIB, 6), Some((8 * GIB, 6)));
        // The modules whose gradients are being reduced; too few bytes.
        assert_eq!(together(8 * GIB, 2), None);
        assert_eq!(together(GIB, 6), None);
    }

    #[test]
    fn a_gather_of_the_whole_model_is_one_block_of_most_parameters() {
        let facts =
            |shards, largest_gather| Facts { capacity: 24 * GIB, shards, largest_gather, ..Facts::default() };
        assert_eq!(facts(GIB, 8 * GIB).whole_gather(8), Some(8 * GIB));
        // Gathered in 16 bits.
        assert_eq!(facts(GIB, 4 * GIB).whole_gather(8), Some(4 * GIB));
        // Each layer by itself, and a model that is not sharded.
        assert_eq!(facts(GIB, 3 * GIB).whole_gather(8), None);
        assert_eq!(facts(GIB, 0).whole_gather(1), None);
        // A small model.
        assert_eq!(facts(GIB / 8, GIB).whole_gather(8), None);
    }

    #[test]
    fn oom_sees_that_fsdp_keeps_the_whole_parameters_of_several_modules() {
        let together = |bytes, modules| {
            Facts { capacity: 24 * GIB, gathered_modules: (bytes, modules), ..Facts::default() }
                .gathered_together()
        };
        assert_eq!(together(8 * GIB, 6), Some((8 * GIB, 6)));
        // The layer that runs, the next one and one that is being freed; too few bytes.
        assert_eq!(together(8 * GIB, 3), None);
        assert_eq!(together(GIB, 6), None);
    }
}
