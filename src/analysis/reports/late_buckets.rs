//! Buckets of `DistributedDataParallel` that a simulated run holds longer than a real one.
//!
//! NCCL's watchdog releases the tensors of finished collectives every 100 ms, and a simulated step takes less
//! time. At the peak, the buckets of the previous step may then still be live in addition to the buckets of
//! this step.

use memtrace_trace::Category;
use memtrace_trace::meta::Meta;
use memtrace_trace::units::Unit;

use crate::read::symbols::SymbolTable;
use crate::state::block::Owner;

/// Buckets that a real run would have freed are reported only if they have at least this fraction of the
/// parameters' bytes: one part in 10.
const LEAST_PART: i64 = 10;

/// Returns a sentence about the buckets that a real run would usually have freed by now, or `None` if there
/// are no such buckets. `live` has the owner and the bytes of each block of one device.
pub(super) fn late_buckets(
    meta: &Meta,
    live: &[(Owner, i64)],
    symbols: &SymbolTable,
    units: Unit,
) -> Option<String> {
    if meta.phantom.is_null() || meta.world_size < 2 {
        return None;
    }
    let sum = |is_it: &dyn Fn(&Owner) -> bool| -> i64 {
        live.iter().filter(|(owner, _)| is_it(owner)).map(|(_, bytes)| bytes).sum()
    };
    let parameters = sum(&|owner| owner.category == Category::Parameter);
    // The reducer allocates its buckets in its constructor, and again before the second forward.
    let is_bucket = |owner: &Owner| {
        owner.category == Category::Gradient
            && *symbols.get(owner.op) == *"aten::empty"
            && ["init", "forward"].contains(&&*symbols.get(owner.phase))
    };
    let late = sum(&is_bucket) - parameters;
    (parameters > 0 && late * LEAST_PART >= parameters).then(|| {
        format!(
            "{} are DistributedDataParallel's gradient buckets of the previous step, which NCCL's watchdog \
             frees on a timer: a real run has usually freed them by then",
            units.show(late)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::record::Record;

    #[test]
    fn summary_names_a_second_set_of_buckets_on_a_simulated_gpu_alone() {
        const MIB: i64 = 1 << 20;
        let symbols = SymbolTable::default();
        let block = |category, op: &str, phase: &str| {
            let (op, phase) = (symbols.intern(op), symbols.intern(phase));
            (Owner { category, op, phase, ..Owner::of(&Record::default()) }, 100 * MIB)
        };
        let all = [
            block(Category::Parameter, "aten::empty_strided", "init"),
            block(Category::Gradient, "aten::mm", "backward"),
            block(Category::Gradient, "aten::empty", "init"),
            block(Category::Gradient, "aten::empty", "forward"),
        ];
        let found = |meta: &Meta, live: &[(Owner, i64)]| late_buckets(meta, live, &symbols, Unit::default());
        let mut meta = Meta { world_size: 8, ..Meta::default() };
        assert_eq!(found(&meta, &all), None, "a real GPU");
        meta.phantom = serde_json::json!({ "card": "h100-80g" });
        assert!(found(&meta, &all).unwrap().starts_with("100.00 MiB are Distributed"));
        assert_eq!(found(&meta, &all[..3]), None, "one set");
        meta.world_size = 1;
        assert_eq!(found(&meta, &all), None, "one rank");
    }
}
