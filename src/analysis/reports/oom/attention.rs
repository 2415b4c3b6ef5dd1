//! Attention that writes all of its scores to memory, as a model does that multiplies queries and keys itself.

use memtrace_trace::EventName;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::model_facts::is_inside;
use crate::state::module_layers::is_number;

/// The role of an op in attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A product of batches of matrices: queries with keys, or scores with values.
    Product,
    Softmax,
    /// Attention as one op, which keeps no scores.
    Fused,
    Other,
}

impl Role {
    fn from_op(op: &str) -> Role {
        match op {
            "aten::bmm" | "aten::baddbmm" | "aten::bmm.out" | "aten::baddbmm.out" => Role::Product,
            _ if op.contains("scaled_dot_product") => Role::Fused,
            _ if op.contains("softmax") && !op.contains("log_softmax") => Role::Softmax,
            _ => Role::Other,
        }
    }
}

/// The largest results in the latest step of a module, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Largest {
    step: i64,
    product: i64,
    softmax: i64,
}

/// Finds the modules that compute attention.
#[derive(Default)]
pub(super) struct AttentionFinder {
    roles: FxHashMap<Symbol, Role>,
    modules: FxHashMap<Symbol, Largest>,
    /// The modules that have run fused attention, with `*` for each number in their paths: a layer whose
    /// attention has not ended yet counts like the layers before it.
    fused: FxHashSet<String>,
}

impl AttentionFinder {
    /// Processes a row. `step` is the current step.
    pub(super) fn feed(&mut self, row: &Record, step: i64, symbols: &SymbolTable) {
        if !matches!(row.event, EventName::Alloc | EventName::Op) {
            return;
        }
        let role = *self.roles.entry(row.op).or_insert_with(|| Role::from_op(&symbols.get(row.op)));
        match (row.event, role) {
            (EventName::Op, Role::Fused) => {
                self.fused.insert(without_numbers(&symbols.get(row.module)));
            }
            (EventName::Alloc, Role::Product | Role::Softmax) if row.status == 0 => {
                let largest = self.modules.entry(row.module).or_default();
                if largest.step != step {
                    *largest = Largest { step, ..Largest::default() };
                }
                let bytes = if role == Role::Product { &mut largest.product } else { &mut largest.softmax };
                *bytes = (*bytes).max(row.delta_bytes);
            }
            _ => {}
        }
    }

    /// Returns true if a module, the module that it is a part of, or another layer like it, has run fused attention.
    /// The parts of such a module, such as the dropout of its output, hold no scores.
    pub(super) fn is_fused(&self, module: Symbol, symbols: &SymbolTable) -> bool {
        if self.fused.is_empty() {
            return false;
        }
        let path = without_numbers(&symbols.get(module));
        self.fused.iter().any(|fused| is_inside(&path, fused))
    }

    /// Returns the bytes of scores, and of masks and copies of scores, among `live` blocks and a request that
    /// failed (its module and bytes). A module counts if it has run a softmax over a product, or if it has run
    /// a product and its name tells of attention.
    pub(super) fn scores(
        &self,
        live: impl Iterator<Item = (Owner, i64)>,
        request: (Symbol, i64),
        symbols: &SymbolTable,
    ) -> i64 {
        let mut is_attention: FxHashMap<Symbol, bool> = FxHashMap::default();
        let mut sum = 0;
        for (module, bytes) in live.map(|(owner, bytes)| (owner.module, bytes)).chain([request]) {
            let Some(Largest { product, softmax, .. }) = self.modules.get(&module).copied() else { continue };
            // The scores may have another type than their softmax.
            let is_softmax = softmax > 0 && product <= 2 * softmax && softmax <= 2 * product;
            let is_named = || softmax == 0 && product > 0 && names_attention(&symbols.get(module));
            let counts = *is_attention
                .entry(module)
                .or_insert_with(|| !self.is_fused(module, symbols) && (is_softmax || is_named()));
            // A mask has a quarter of the bytes of float32 scores.
            let scores = if softmax > 0 { softmax } else { product };
            if counts && 4 * bytes >= scores && bytes <= 2 * scores {
                sum += bytes;
            }
        }
        sum
    }
}

/// Returns the path of a module with `*` for each number.
fn without_numbers(path: &str) -> String {
    let parts = path.split('.').map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

/// Returns true if a text, such as the path of a module, names attention.
pub(super) fn names_attention(text: &str) -> bool {
    let text = text.to_lowercase();
    text.contains("attn") || text.contains("attention")
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Category;

    use super::*;

    const MIB: i64 = 1 << 20;

    /// Returns the scores among these blocks. All blocks are in `module` and of step 0.
    fn scores(module: &str, blocks: &[(&str, i64)]) -> i64 {
        let symbols = SymbolTable::default();
        let mut finder = AttentionFinder::default();
        let path = symbols.intern(module);
        let mut live = Vec::new();
        for (op, bytes) in blocks {
            let row = Record {
                event: if *bytes > 0 { EventName::Alloc } else { EventName::Op },
                op: symbols.intern(op),
                module: path,
                delta_bytes: *bytes,
                ..Record::default()
            };
            finder.feed(&row, 0, &symbols);
            let owner = Owner::from_row(&Record { category: Category::Activation, ..row });
            live.push((owner, *bytes));
        }
        finder.scores(live.into_iter(), (path, 0), &symbols)
    }

    #[test]
    fn oom_counts_the_scores_of_attention_that_a_model_computes_itself() {
        let own = [("aten::bmm", 256 * MIB), ("aten::_softmax", 256 * MIB), ("aten::addmm", 8 * MIB)];
        assert_eq!(scores("Net.mix", &own), 512 * MIB);
        // Before the softmax, only the name tells.
        assert_eq!(scores("Net.blocks.0.attn", &own[..1]), 256 * MIB);
        assert_eq!(scores("Net.mix", &own[..1]), 0);
        // The op of fused attention ends after its products.
        let fused = [
            ("aten::bmm", 256 * MIB),
            ("aten::_softmax", 256 * MIB),
            ("aten::scaled_dot_product_attention", 0),
        ];
        assert_eq!(scores("Net.blocks.0.attn", &fused), 0);
        // The softmax of a router is no softmax over the products of its experts, and neither is a loss.
        let experts = [("aten::bmm", 256 * MIB), ("aten::_softmax", MIB)];
        assert_eq!(scores("Net.experts", &experts), 0);
        let loss = [("aten::bmm", 256 * MIB), ("aten::_log_softmax", 256 * MIB)];
        assert_eq!(scores("Net.loss", &loss), 0);
    }
}
