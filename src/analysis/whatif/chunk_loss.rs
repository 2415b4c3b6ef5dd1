//! Runs the head and the loss on parts of the tokens: each part is checkpointed, so only one part's logits
//! exist at a time.

use rustc_hash::{FxHashMap, FxHashSet};

use super::curve::Curve;
use super::sizes::SizeRules;
use super::step::{Life, NO_CALL, RecordedStep};
use crate::read::symbols::SymbolTable;
use crate::state::block::is_unknown_form;
use crate::state::categories::Phases;

/// The op of the loss.
const LOSS: &str = "aten::cross_entropy_loss";
/// The op inside the loss that allocates a block of the logits' size.
const LOG_SOFTMAX: &str = "aten::_log_softmax";

/// One loss of a step.
struct Loss {
    /// The birth of the block that holds the log-softmax.
    birth: u32,
    /// The requested size of its logits, in bytes.
    size: i64,
    /// The birth of the first gradient of that size; `u32::MAX` if there is no gradient.
    first: u32,
    /// The gradient of this size that is freed last, as an index of [`RecordedStep::lives`].
    last: Option<u32>,
}

/// Divides the sizes of the logits and their gradients in a step by `parts`. Returns the number of losses.
pub(super) fn apply(
    curve: &mut Curve,
    step: &RecordedStep,
    parts: i64,
    rules: &SizeRules<'_>,
    symbols: &SymbolTable,
    phases: &Phases,
) -> u64 {
    let mut losses = losses(step, symbols, phases);
    // The losses by the size of their logits, in order of birth. Each loss is also listed under half the
    // size: logits in 16 bits have half the size before they are cast to float32.
    let mut by_size: FxHashMap<i64, Vec<usize>> = FxHashMap::default();
    for (index, loss) in losses.iter().enumerate() {
        for size in [loss.size, loss.size / 2] {
            by_size.entry(size).or_default().push(index);
        }
    }
    for (index, life) in step.lives.iter().enumerate() {
        let Some(same) = by_size.get(&life.requested) else { continue };
        let before = same.partition_point(|loss| losses[*loss].birth < life.birth);
        // A block of this size that is live when a loss allocates its log-softmax is taken to be its logits.
        let is_logits = !life.is_older
            && life.call != NO_CALL
            && same.get(before).is_some_and(|loss| losses[*loss].birth < life.death);
        let is_gradient = life.owner.phase == phases.backward && before > 0;
        if !is_logits && !is_gradient {
            continue;
        }
        curve.sizes[index] = rules.resized(life, largest_part(curve.sizes[index], life, parts, symbols));
        if is_gradient {
            let loss = &mut losses[same[before - 1]];
            loss.first = loss.first.min(life.birth);
            let is_later = loss.last.is_none_or(|last| step.lives[last as usize].death < life.death);
            loss.last = if is_later { Some(index as u32) } else { loss.last };
        }
    }
    // The op that frees the last gradient of a loss is the backward of the head. The key is that op, the
    // value the first gradient of its losses.
    let mut heads: FxHashMap<u32, u32> = FxHashMap::default();
    for loss in &losses {
        let Some(last) = loss.last else { continue };
        let first = heads.entry(step.lives[last as usize].freed_by).or_insert(loss.first);
        *first = loss.first.min(*first);
    }
    for (head, first) in heads {
        keep_gradients(curve, step, head, first);
    }
    losses.len() as u64
}

/// Returns the bytes of the largest part, if the tokens of a block of `bytes` are split into `parts`. A part has
/// whole tokens: those of all dimensions but the last. If the shape is unknown, the parts count as equal.
fn largest_part(bytes: i64, life: &Life, parts: i64, symbols: &SymbolTable) -> i64 {
    let tokens = match is_unknown_form(life.shape) {
        true => None,
        false => tokens_of(&symbols.get(life.shape)),
    };
    match tokens {
        Some(tokens) => bytes / tokens * ((tokens - 1) / parts + 1),
        None => bytes / parts,
    }
}

/// Returns the product of all dimensions but the last of a shape such as `[8x1024x50304]`; `None` if there is no
/// such dimension or one is 0.
fn tokens_of(shape: &str) -> Option<i64> {
    let (dimensions, _) = shape.strip_prefix('[')?.strip_suffix(']')?.rsplit_once('x')?;
    dimensions
        .split('x')
        .try_fold(1, |product: i64, size| product.checked_mul(size.parse().ok().filter(|size| *size > 0)?))
}

/// Returns the losses of the forward passes of a step, in order.
fn losses(step: &RecordedStep, symbols: &SymbolTable, phases: &Phases) -> Vec<Loss> {
    let (loss, log_softmax) = (symbols.intern(LOSS), symbols.intern(LOG_SOFTMAX));
    let is_loss = |call: u32| step.op(call).is_some_and(|op| op.name == loss && op.phase != phases.backward);
    let mut seen: FxHashSet<u32> = FxHashSet::default();
    let results = step.lives.iter().filter(|life| life.owner.op == log_softmax && is_loss(life.call));
    results
        .filter(|life| seen.insert(life.call))
        .map(|life| Loss { birth: life.birth, size: life.requested, first: u32::MAX, last: None })
        .collect()
}

/// Extends the lives of the gradients that the op `head` allocates for its weight and its input. Each part of
/// the loss adds to these gradients, so they must exist from the allocation `first` on.
fn keep_gradients(curve: &mut Curve, step: &RecordedStep, head: u32, first: u32) {
    let Some(end) = step.op(head).map(|op| op.to) else { return };
    for index in step.allocations_of(head).iter().filter_map(|allocation| allocation.life) {
        let life = &step.lives[index as usize];
        if life.death > end {
            curve.set_lives(index, &[(first.min(life.birth), life.death)]);
            curve.add_spike(life.birth + 1, curve.sizes[index as usize], life.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advise_counts_the_tokens_of_a_shape() {
        assert_eq!(tokens_of("[8x1024x50304]"), Some(8192));
        assert_eq!(tokens_of("[10x50304]"), Some(10));
        for shape in ["[50304]", "[]", "[0x50304]", "?", "", "[4294967296x4294967296x1]"] {
            assert_eq!(tokens_of(shape), None, "{shape}");
        }
    }
}
