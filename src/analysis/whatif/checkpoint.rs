//! Checkpointed modules: what a forward keeps goes at its end, and comes back for its backward.
//!
//! `torch.utils.checkpoint` keeps the inputs of a call. At the first backward function of the call that needs a saved
//! tensor it runs the forward again, up to the last saved tensor.

use rustc_hash::FxHashSet;

use super::curve::{Curve, highest};
use super::step::{ALIVE, Call, Life, NO_CALL, Step};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// Moves the blocks of the calls of `modules`; returns the number of calls that it changed.
pub(super) fn apply(
    curve: &mut Curve<'_>,
    step: &Step,
    modules: &FxHashSet<Symbol>,
    symbols: &SymbolTable,
    phases: &Phases,
) -> u64 {
    let mut calls: Vec<&Call> = step
        .modules
        .iter()
        .filter(|call| modules.contains(&call.name) && call.phase != phases.backward && call.from < call.to)
        .collect();
    // A call inside another one is recomputed with it.
    calls.sort_by_key(|call| (call.from, std::cmp::Reverse(call.to)));
    let mut end = 0;
    calls.retain(|call| {
        let is_outer = call.from >= end;
        end = end.max(call.to);
        is_outer
    });
    let (sum, oom) = (symbols.intern("aten::sum"), step.oom());
    let mut changed = 0;
    for call in calls {
        let path = symbols.get(call.name);
        let is_below = |module: Symbol| {
            let name = symbols.get(module);
            name.strip_prefix(&*path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        changed += u64::from(recompute(curve, step, call, is_below, phases, sum, oom));
    }
    changed
}

/// The blocks of one call of a checkpointed module, as indices of [`Step::lives`].
struct Kept {
    /// Those that its own backward frees, in order of birth.
    inner: Vec<u32>,
    /// The blocks that it allocates, in order.
    born: Vec<u32>,
}

fn recompute(
    curve: &mut Curve<'_>,
    step: &Step,
    call: &Call,
    is_below: impl Fn(Symbol) -> bool,
    phases: &Phases,
    sum: Symbol,
    oom: Option<u32>,
) -> bool {
    let born: Vec<u32> = step.allocations[call.from as usize..call.to as usize]
        .iter()
        .filter_map(|allocation| allocation.life)
        .collect();
    let life = |index: &u32| &step.lives[*index as usize];
    let is_freed_inside = |life: &Life| {
        life.death != ALIVE
            && step.op(life.freed_by).is_some_and(|op| op.phase == phases.backward && is_below(op.module))
    };
    // Out of memory before that backward: what the forward left is there for it.
    let is_left_at_oom = |life: &Life| {
        oom.is_some_and(|oom| call.to <= oom && life.death > oom && step.op(life.freed_by).is_none())
    };
    let mut kept = Kept {
        inner: born
            .iter()
            .copied()
            .filter(|index| life(index).death > call.to)
            .filter(|index| is_freed_inside(life(index)) || is_left_at_oom(life(index)))
            .collect(),
        born,
    };
    keep_output(&mut kept, step, call);
    let Some(last) = kept.inner.last().copied() else { return false };
    // The backward of the call begins with the op that frees the first of them.
    let begin = |index: &u32| step.op(life(index).freed_by).map_or(life(index).death, |op| op.from);
    let Some(at) = kept.inner.iter().map(begin).min() else { return false };
    if is_left_at_oom(life(&last)) {
        for index in &kept.inner {
            curve.set_lives(*index, &[(life(index).birth, call.to)]);
        }
        return true;
    }
    let end = kept.inner.iter().map(|index| life(index).death).max().unwrap_or(at);
    for index in &kept.inner {
        let death = end_of_use(step, life(index), sum);
        curve.set_lives(*index, &[(life(index).birth, call.to), (at.min(death), death)]);
    }
    // The highest total of the second forward, which stops at the last tensor that the backward needs.
    let again = kept.born.iter().filter(|index| life(index).birth <= life(&last).birth);
    let highest =
        highest(again.map(|index| (life(index).birth, life(index).death, curve.sizes[*index as usize])));
    let left: i64 = kept.inner.iter().map(|index| curve.sizes[*index as usize]).fold(0, i64::wrapping_add);
    let owner = step.allocations[call.from as usize].owner;
    curve.add_spike(at, highest.wrapping_sub(left), Owner { phase: phases.backward, ..owner });
    let has_saved_input =
        step.lives.iter().any(|life| !life.is_older && life.birth < call.from && is_freed_inside(life));
    if !has_saved_input {
        keep_inputs(curve, step, call, end, phases);
    }
    true
}

/// Takes the result of the call out of its inner blocks: the caller holds it. Mostly a later module frees it, but its own
/// backward may need it too (the result of a ReLU or an LSTM). Then the first backward function frees it, and it is the
/// first block of the last forward op that made one of these.
fn keep_output(kept: &mut Kept, step: &Step, call: &Call) {
    let life = |index: &u32| &step.lives[*index as usize];
    let has_other = kept.born.iter().any(|index| life(index).death > call.to && !kept.inner.contains(index));
    if has_other {
        return;
    }
    let Some(first) = kept.inner.iter().map(|index| life(index).freed_by).min() else { return };
    let freed: Vec<u32> = kept.inner.iter().copied().filter(|index| life(index).freed_by == first).collect();
    let op = freed.iter().map(|index| life(index).call).max();
    let output = freed.into_iter().find(|index| Some(life(index).call) == op);
    kept.inner.retain(|index| Some(*index) != output);
}

/// The moment at which the second forward's block goes: when the backward function that needs it returns. A block that the
/// first forward saved goes later, when autograd has summed that function's gradients to the shapes of its inputs.
fn end_of_use(step: &Step, life: &Life, sum: Symbol) -> u32 {
    let Some(op) = step.op(life.freed_by) else { return life.death };
    let range = op.from as usize..op.to as usize;
    let sums = step.allocations[range].iter().rev().take_while(|allocation| allocation.owner.op == sum);
    life.death.min(op.to - sums.count() as u32)
}

/// The inputs of a call of which it saves none, and which its caller drops, stay to the end of its backward.
fn keep_inputs(curve: &mut Curve<'_>, step: &Step, call: &Call, end: u32, phases: &Phases) {
    for (index, life) in step.lives.iter().enumerate() {
        let is_input = !life.is_older
            && life.birth < call.from
            && life.owner.phase == phases.forward
            && (call.from + 1..=call.to).contains(&life.death)
            && life.call != NO_CALL;
        if is_input {
            curve.set_lives(index as u32, &[(life.birth, end)]);
        }
    }
}
