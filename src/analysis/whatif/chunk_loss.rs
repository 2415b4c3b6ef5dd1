//! The head and the loss on parts of the tokens: each part is checkpointed, so one part's logits are there at a time.

use super::curve::Curve;
use super::sizes::resized;
use super::step::{Life, NO_CALL, Step};
use crate::read::symbols::SymbolTable;
use crate::state::categories::Phases;

/// The op of the loss.
const LOSS: &str = "aten::cross_entropy_loss";
/// The op in it that allocates a block of the logits' size.
const LOG_SOFTMAX: &str = "aten::_log_softmax";

/// Divides the blocks of the losses of a step by `parts`; returns the number of losses.
pub(super) fn apply(
    curve: &mut Curve<'_>,
    step: &Step,
    parts: i64,
    symbols: &SymbolTable,
    phases: &Phases,
) -> u64 {
    let (loss, log_softmax) = (symbols.intern(LOSS), symbols.intern(LOG_SOFTMAX));
    let mut losses = 0;
    for (index, op) in step.ops.iter().enumerate() {
        if op.name != loss || op.phase == phases.backward {
            continue;
        }
        let is_result = |life: &&Life| life.call == index as u32 && life.owner.op == log_softmax;
        let Some(result) = step.lives.iter().find(is_result) else { continue };
        losses += 1;
        divide(curve, step, result, parts, phases);
    }
    losses
}

/// Divides the blocks of one loss. `result` is the block of its log-softmax.
fn divide(curve: &mut Curve<'_>, step: &Step, result: &Life, parts: i64, phases: &Phases) {
    let size = result.requested;
    // Logits of 16 bits are cast before.
    let is_logits = |life: &Life| {
        !life.is_older
            && (life.requested == size || life.requested == size / 2)
            && life.birth <= result.birth
            && life.death > result.birth
            && life.call != NO_CALL
    };
    let is_gradient = |life: &Life| {
        life.owner.phase == phases.backward
            && life.birth > result.birth
            && (life.requested == size || life.requested == size / 2)
    };
    let mut last: Option<&Life> = None;
    let mut first = u32::MAX;
    for (index, life) in step.lives.iter().enumerate() {
        if is_logits(life) || is_gradient(life) {
            let scaled = curve.sizes[index] / parts;
            curve.sizes[index] = resized(life, scaled);
            if is_gradient(life) {
                first = first.min(life.birth);
                last = last.filter(|last| last.death >= life.death).or(Some(life));
            }
        }
    }
    // The op that frees the last of them is the head's: it allocates the gradients of the weight and of its input, to which
    // each part adds its own.
    let Some(head) = last.and_then(|last| step.op(last.freed_by)) else { return };
    let made: Vec<usize> = step.allocations[head.from as usize..head.to as usize]
        .iter()
        .filter_map(|allocation| allocation.life)
        .map(|life| life as usize)
        .filter(|index| step.lives[*index].death > head.to)
        .collect();
    for index in made {
        let life = &step.lives[index];
        curve.set_lives(index as u32, &[(first.min(life.birth), life.death)]);
        curve.add_spike(life.birth + 1, curve.sizes[index], life.owner);
    }
}
