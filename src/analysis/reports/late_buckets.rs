//! Gradients that a simulated run of several ranks holds longer than a real one.
//!
//! NCCL's watchdog releases the tensors of finished collectives every 100 ms, and a simulated step takes less
//! time. At the peak, the gradients of the previous step may then still be live in addition to those of this
//! step: the buckets of `DistributedDataParallel`, or gradients that the program reduced itself. The peak then
//! depends on the clock, and differs between two runs.

use memtrace_trace::Category;
use memtrace_trace::meta::Meta;
use memtrace_trace::units::Unit;

use crate::read::symbols::SymbolTable;
use crate::state::block::Owner;

/// Gradients that a real run would have freed are reported only if they have at least this fraction of the
/// parameters' bytes: one part in 10.
const LEAST_PART: i64 = 10;

/// Returns a sentence about the gradients that a real run would usually have freed by now, or `None` if there
/// are no such gradients. `live` has the owner and the bytes of each block of one device.
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
    let is_gradient = |owner: &Owner| owner.category == Category::Gradient;
    // The reducer allocates its buckets in its constructor, and again before the second forward.
    let is_bucket = |owner: &Owner| {
        is_gradient(owner)
            && *symbols.get(owner.op) == *"aten::empty"
            && ["init", "forward"].contains(&&*symbols.get(owner.phase))
    };
    let buckets = sum(&is_bucket) - parameters;
    // Gradients of earlier steps, beyond one set: a program that keeps its gradients has one set of them.
    let step = live.iter().map(|(owner, _)| owner.step).max().unwrap_or(0);
    let earlier = sum(&|owner| is_gradient(owner) && !is_bucket(owner) && owner.step < step);
    let gradients = earlier.min(sum(&|owner| is_gradient(owner) && !is_bucket(owner)) - parameters);
    let (late, what) = if buckets >= gradients {
        (
            buckets,
            "DistributedDataParallel's gradient buckets of the previous step, which NCCL's watchdog frees",
        )
    } else {
        (gradients, "gradients of an earlier step, whose collectives NCCL's watchdog releases")
    };
    (parameters > 0 && late * LEAST_PART >= parameters).then(|| {
        let late = units.show(late);
        format!(
            "{late} are {what} on a timer: a real run has usually freed them by then, so its peak is up to {late} \
             lower"
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
            (Owner { category, op, phase, ..Owner::from_row(&Record::default()) }, 100 * MIB)
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

    #[test]
    fn summary_names_gradients_of_an_earlier_step_that_the_watchdog_holds() {
        const MIB: i64 = 1 << 20;
        let symbols = SymbolTable::default();
        let (op, phase) = (symbols.intern("aten::mm"), symbols.intern("backward"));
        let block = |category, step| {
            (Owner { category, op, phase, step, ..Owner::from_row(&Record::default()) }, 100 * MIB)
        };
        let meta = Meta { world_size: 8, phantom: serde_json::json!({}), ..Meta::default() };
        let found = |live: &[(Owner, i64)]| late_buckets(&meta, live, &symbols, Unit::default());
        let (parameter, old, new) =
            (block(Category::Parameter, -1), block(Category::Gradient, 3), block(Category::Gradient, 4));
        let text = found(&[parameter, old, new]).unwrap();
        assert!(text.starts_with("100.00 MiB are gradients of an earlier step"), "{text}");
        assert!(text.ends_with("its peak is up to 100.00 MiB lower"), "{text}");
        assert_eq!(found(&[parameter, new, new]), None, "two sets of one step");
        assert_eq!(found(&[parameter, old]), None, "a program that keeps its gradients");
    }
}
