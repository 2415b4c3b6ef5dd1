//! The memory of a model that FSDP shards: what it gathers, and what it has not reduced.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::Category;
use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::OomCase;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::module_layers::is_number;

/// The minimum number of layers whose whole parameters are live together if FSDP does not reshard them after their
/// forward. If it does, at most three are: the layer that runs, the next one, and one that is being freed.
const FEWEST_GATHERED_MODULES: usize = 4;

/// Returns the bytes of the whole gradients that FSDP has not reduced, and the number of their layers. A gradient belongs
/// to a module inside its layer, such as `Net.layers.3.mlp.up`, so the layer is the first part with a number.
///
/// `earlier` has the phase of the backward if none runs and the model is sharded: what a backward has left is then a
/// gradient, whose category is known only when it is reduced.
fn unreduced(live: &[(Owner, i64)], earlier: Option<Symbol>, symbols: &SymbolTable) -> (i64, usize) {
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

/// Returns the bytes and the number of layers of the parent with most layers, then most bytes. `parents` has
/// these layers and their bytes for each parent.
fn most_layers<T>(parents: BTreeMap<String, (i64, BTreeSet<T>)>) -> (i64, usize) {
    let counts = parents.into_values().map(|(bytes, layers)| (bytes, layers.len()));
    counts.max_by_key(|(bytes, layers)| (*layers, *bytes)).unwrap_or_default()
}

/// Returns the bytes of the blocks of a category, such as the whole parameters that FSDP has gathered, and the number of
/// their layers. Only numbered layers below one parent count (`Net.layers.3`), not the root, which FSDP keeps by design,
/// and not the single linear layers that DeepSpeed gathers.
fn modules_of(live: &[(Owner, i64)], category: Category, symbols: &SymbolTable) -> (i64, usize) {
    let mut parents: BTreeMap<String, (i64, BTreeSet<usize>)> = BTreeMap::new();
    for (owner, size) in live.iter().filter(|(owner, _)| owner.category == category) {
        let module = symbols.get(owner.module);
        let layer = module.rsplit_once('.').filter(|(_, name)| is_number(name));
        if let Some((parent, _)) = layer {
            let (bytes, layers) = parents.entry(parent.to_owned()).or_default();
            *bytes += size;
            layers.insert(owner.module.index());
        }
    }
    most_layers(parents)
}

/// Returns the bytes of the block into which FSDP has gathered most of the model's parameters at once, if there
/// is one and it is a significant share of the card.
fn whole_gather(case: &OomCase<'_>) -> Option<i64> {
    let of = |categories: &'static [Category]| {
        let blocks = case.live.iter().filter(|(owner, _)| categories.contains(&owner.category));
        blocks.map(|(_, bytes)| *bytes)
    };
    let shards: i64 = of(&[Category::Parameter]).sum();
    let largest = of(&[Category::UnshardedParameter, Category::AllGather]).max().unwrap_or(0);
    let is_it = is_whole(&case.evidence, largest, shards, case.oom_state.trace.meta.world_size);
    is_it.then_some(largest)
}

/// Returns true if the largest gathered block has most parameters of a model, of which each of the `ranks`
/// has `shards` bytes.
fn is_whole(evidence: &Evidence, largest: i64, shards: i64, ranks: i32) -> bool {
    let model = shards.saturating_mul(i64::from(ranks));
    // With mixed precision, gathered parameters are half as large as the shards. A layer that is gathered by
    // itself has its own block, even if it stays gathered (`reshard_after_forward=False`).
    let is_most = largest > 0 && largest.saturating_mul(5) >= model.saturating_mul(2);
    is_most && evidence.is_material(largest)
}

/// Returns the bytes and the layer count if both exceed what a sharded model needs at once.
fn many_layers(evidence: &Evidence, of: (i64, usize)) -> Option<(i64, usize)> {
    Some(of).filter(|(bytes, layers)| *layers >= FEWEST_GATHERED_MODULES && evidence.is_material(*bytes))
}

pub(super) fn remedy_for_whole_gather(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let gathered = whole_gather(case)?;
    Some(format!(
        "fully_shard(layer) for each layer before fully_shard(model), or FullyShardedDataParallel's auto_wrap_policy: all \
         parameters are gathered at once now, {}",
        units.show(gathered)
    ))
}

/// The whole parameters of many modules are live together.
pub(super) fn remedy_for_gathered_modules(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let gathered = modules_of(&case.live, Category::UnshardedParameter, case.oom_state.symbols());
    let (bytes, modules) = many_layers(&case.evidence, gathered)?;
    let saved = bytes / modules as i64 * (modules as i64 - 2);
    Some(format!(
        "reshard_after_forward=True for fully_shard(layer) (FullyShardedDataParallel: ShardingStrategy.FULL_SHARD): the whole \
         parameters of {modules} modules are live at once now, {}{}",
        units.show(bytes),
        case.unsure(saved)
    ))
}

/// The whole gradients of many modules are live together. FSDP reduces each to a shard as soon as the
/// module's backward ends, except under `no_sync()`.
pub(super) fn remedy_for_whole_gradients(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let is_sharded = |(owner, _): &(Owner, i64)| {
        matches!(owner.category, Category::UnshardedParameter | Category::AllGather)
    };
    let is_between = case.oom_state.is_in_forward() && case.live.iter().any(is_sharded);
    let earlier = is_between.then_some(case.oom_state.replayed.replay.phases.backward);
    let (bytes, modules) =
        many_layers(&case.evidence, unreduced(&case.live, earlier, case.oom_state.symbols()))?;
    // If the root alone is sharded, all gradients are whole until its backward ends.
    let is_by_design = !case.oom_state.is_in_forward() && whole_gather(case).is_some();
    (!is_by_design).then(|| {
        format!(
            "reduce the gradients in each backward, without no_sync() (fully_shard: set_requires_gradient_sync(True); accelerate: \
             GradientAccumulationPlugin(sync_each_batch=True)): the whole gradients of {modules} modules are live at once now, {}",
            units.show(bytes)
        )
    })
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Meta;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::read::record::Record;

    #[test]
    fn oom_counts_the_layers_whose_gradients_are_whole() {
        let symbols = SymbolTable::default();
        let blocks = |paths: &[&str], category: Category| -> Vec<(Owner, i64)> {
            let block = |path: &&str| {
                let row = Record { module: symbols.intern(path), category, ..Record::default() };
                (Owner::from_row(&row), 100)
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
    fn oom_counts_only_layers_that_a_sharded_model_does_not_need_at_once() {
        let card = Evidence::default().with(|e| e.device.capacity = 24 * GIB);
        let together = |bytes, modules| many_layers(&card, (bytes, modules));
        assert_eq!(together(8 * GIB, 6), Some((8 * GIB, 6)));
        // The layer that runs, the next one and one that is being freed; too few bytes.
        assert_eq!(together(8 * GIB, 3), None);
        assert_eq!(together(GIB, 6), None);
    }

    #[test]
    fn a_gather_of_the_whole_model_is_one_block_of_most_parameters() {
        let card = Evidence::default().with(|e| e.device.capacity = 24 * GIB);
        let is_whole = |shards, largest, ranks| is_whole(&card, largest, shards, ranks);
        assert!(is_whole(GIB, 8 * GIB, 8));
        // Gathered in 16 bits.
        assert!(is_whole(GIB, 4 * GIB, 8));
        // Each layer by itself, and a model that is not sharded.
        assert!(!is_whole(GIB, 3 * GIB, 8));
        assert!(!is_whole(GIB, 0, 1));
        // A small model.
        assert!(!is_whole(GIB / 8, GIB, 8));
    }

    const LAYERS: [&str; 4] = ["Net.layers.0", "Net.layers.1", "Net.layers.2", "Net.layers.3"];

    /// A rank of 8 with shards of 1 GiB fails in this phase, with blocks of `each` bytes of this category.
    fn trace(category: Category, modules: &[&str], each: i64, phase: &str) -> OomTrace {
        let mut trace = OomTrace::without_sample(24 * GIB, Meta { world_size: 8, ..Meta::default() });
        trace.parameter(GIB, "Net");
        for module in modules {
            trace.tagged(each, category, owner(module, phase, 0));
        }
        trace.fill(512 * MIB, owner("Net", phase, 0));
        trace.fails(GIB, owner("Net", phase, 0));
        trace
    }

    #[test]
    fn oom_advises_to_shard_each_layer() {
        let gathered = |bytes: i64| trace(Category::UnshardedParameter, &["Net"], bytes, "forward");
        gathered(8 * GIB).prints(&[
            "try: fully_shard(layer) for each layer before fully_shard(model), or FullyShardedDataParallel's auto_wrap_policy: all \
             parameters are gathered at once now, 8.00 GiB",
        ]);
        gathered(3 * GIB).never_prints("fully_shard(layer)");
    }

    #[test]
    fn oom_advises_to_free_the_parameters_that_a_layer_has_gathered() {
        let gathered = |count: usize| trace(Category::UnshardedParameter, &LAYERS[..count], GIB, "forward");
        gathered(4).prints(&[
            "try: reshard_after_forward=True for fully_shard(layer) (FullyShardedDataParallel: ShardingStrategy.FULL_SHARD): the whole \
             parameters of 4 modules are live at once now, 4.00 GiB, may not be enough alone",
        ]);
        gathered(3).never_prints("reshard_after_forward");
    }

    #[test]
    fn oom_advises_to_reduce_gradients_in_each_backward() {
        let whole = |count: usize| trace(Category::UnshardedGradient, &LAYERS[..count], GIB, "backward");
        whole(4).prints(&[
            "try: reduce the gradients in each backward, without no_sync() (fully_shard: set_requires_gradient_sync(True); accelerate: \
             GradientAccumulationPlugin(sync_each_batch=True)): the whole gradients of 4 modules are live at once now, 4.00 GiB",
        ]);
        whole(3).never_prints("no_sync()");
    }
}
