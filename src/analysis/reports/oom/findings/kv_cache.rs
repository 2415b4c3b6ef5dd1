//! A cache of keys and values that takes a significant share of the card.

use memtrace_trace::Category;
use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::counted;
use crate::state::block::is_unknown_form;

/// A server sets its pool aside, and a forward in training keeps its keys and values for the backward.
pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    if case.oom_state.whole.server.is_some() || case.evidence.forwards.has_autograd {
        return None;
    }
    let blocks = case.oom_state.replayed.replay.live_on(case.oom_state.row.device, false);
    let forms = blocks.iter().map(|block| (block.owner.category, block.bytes, block.dtype, block.shape));
    let cache = KeyValueCache::find(forms, case.oom_state.symbols());
    case.evidence.is_material(cache.bytes).then(|| cache.line(units))
}

/// The live blocks of a cache of keys and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct KeyValueCache {
    bytes: i64,
    tensors: u64,
    /// The type and the shape of the largest tensor, such as `float32[96x8x512x64]`; empty if they are unknown.
    largest: String,
}

impl KeyValueCache {
    /// `live` has the category, the bytes, the type and the shape of each live block.
    fn find(
        live: impl Iterator<Item = (Category, i64, Symbol, Symbol)>,
        symbols: &SymbolTable,
    ) -> KeyValueCache {
        let mut cache = KeyValueCache::default();
        let mut most = 0;
        for (_, bytes, dtype, shape) in live.filter(|(category, ..)| *category == Category::KvCache) {
            cache.bytes += bytes;
            cache.tensors += 1;
            if bytes > most && !is_unknown_form(shape) {
                most = bytes;
                cache.largest = format!("{}{}", symbols.get(dtype), symbols.get(shape));
            }
        }
        cache
    }

    /// Returns the remedies, with the size of the cache.
    fn line(&self, units: Unit) -> String {
        let KeyValueCache { bytes, tensors, largest } = self;
        let form = if largest.is_empty() { String::new() } else { format!(", the largest {largest}") };
        format!(
            "fewer sequences or beams at once, fewer tokens (a shorter prompt, max_new_tokens, a sliding window), or a cache on the CPU or \
             in 4 bits (cache_implementation=\"offloaded\" or \"quantized\" in transformers, for a model without an encoder): the cache of keys and values \
             (past_key_values) takes {} in {}{form}, and a dynamic cache grows with each token",
            units.show(*bytes),
            counted(*tensors, "tensor"),
        )
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;

    #[test]
    fn oom_names_the_size_and_the_largest_tensor_of_a_cache() {
        let symbols = SymbolTable::default();
        let block = |category, mib: i64, shape: &str| {
            (category, mib << 20, symbols.intern("float32"), symbols.intern(shape))
        };
        let live = [
            block(Category::KvCache, 200, "[8x8x100x64]"),
            block(Category::KvCache, 300, "[8x8x150x64]"),
            block(Category::Activation, 900, "[8x1000]"),
        ];
        let cache = KeyValueCache::find(live.into_iter(), &symbols);
        assert_eq!(cache.bytes, 500 << 20);
        let line = cache.line(Unit::Auto);
        assert!(
            line.contains("takes 500.00 MiB in 2 tensors, the largest float32[8x8x150x64], and a dynamic"),
            "{line}"
        );
    }

    /// A generation fails with a cache of two tensors of `each` bytes.
    fn trace(each: i64, has_graph: bool) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        let key = Row { dtype: "float32", shape: "[96x8x512x64]", ..owner("Llama", "forward", 0) };
        trace.tagged(each, Category::KvCache, key);
        trace.tagged(each, Category::KvCache, key);
        trace.fill(512 * MIB, owner("Llama", "forward", 0));
        trace.fails(GIB, owner("Llama", "forward", 0));
        if !has_graph {
            trace.found(&[]);
        }
        trace
    }

    #[test]
    fn oom_advises_a_smaller_cache() {
        trace(3 * GIB, false).prints(&[
            "try: fewer sequences or beams at once, fewer tokens (a shorter prompt, max_new_tokens, a sliding window), or a cache on the CPU \
             or in 4 bits (cache_implementation=\"offloaded\" or \"quantized\" in transformers, for a model without an encoder): the cache \
             of keys and values (past_key_values) takes 6.00 GiB in 2 tensors, the largest float32[96x8x512x64], and a dynamic cache grows \
             with each token",
        ]);
        trace(3 * GIB, true).never_prints("cache of keys and values");
        trace(GIB, false).never_prints("cache of keys and values");
    }
}
