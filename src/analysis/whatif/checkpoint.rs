//! Checkpointed modules: the blocks that a forward keeps are freed at its end, and allocated again for its
//! backward.
//!
//! `torch.utils.checkpoint` keeps the inputs of a call. At the first backward function of the call that needs
//! a saved tensor, it runs the forward again, up to the last saved tensor.
//!
//! If the program already has one checkpoint around several of the modules, the blocks of all their second
//! forwards are live at once in its backward. A checkpoint of each module then changes these second forwards,
//! too.

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use super::calls::{ModulesAbove, calls_again, outer_calls};
use super::curve::{Curve, highest};
use super::step::{ALIVE, Life, NO_CALL, RecordedStep, StepCall};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// Changes the lives of the blocks that the calls of `modules` allocate, and adds the memory of the second
/// forward. Returns the number of changed calls.
pub(super) fn apply(
    curve: &mut Curve,
    step: &RecordedStep,
    modules: &FxHashSet<Symbol>,
    symbols: &SymbolTable,
    phases: &Phases,
) -> u64 {
    let mut calls = outer_calls(step, modules, phases);
    let again = calls_again(step, modules, phases);
    calls.extend(&again);
    let mut pass = Recomputed {
        step,
        phases,
        oom: step.oom(),
        sum: symbols.intern("aten::sum"),
        sums: FxHashMap::default(),
        above: ModulesAbove::new(&calls, symbols),
        first_saved: FxHashMap::default(),
        again: again.iter().map(|call| call.from).collect(),
        shared_until: 0,
        begun_at_oom: FxHashMap::default(),
    };
    pass.find_first_saved();
    pass.find_begun_at_oom(&calls);
    calls.into_iter().map(|call| u64::from(pass.recompute(curve, call))).sum()
}

/// The blocks of one call of a checkpointed module, as indices of [`RecordedStep::lives`].
struct Kept {
    /// The blocks that the call's own backward frees, in order of birth.
    inner: Vec<u32>,
    /// The blocks that the call allocates, in order.
    born: Vec<u32>,
}

/// The checkpointed calls of a step. All calls are processed in one pass over the step, so the work does not
/// grow with their number.
struct Recomputed<'a> {
    step: &'a RecordedStep,
    phases: &'a Phases,
    /// The last request that ran out of memory, as the number of allocations before it.
    oom: Option<u32>,
    /// `aten::sum`, with which autograd reduces a gradient to the shape of a broadcast input.
    sum: Symbol,
    /// For each op: the number of `aten::sum` allocations at its end.
    sums: FxHashMap<u32, u32>,
    above: ModulesAbove<'a>,
    /// For each module: the birth of the first block in the step that the module's backward frees.
    first_saved: FxHashMap<Symbol, u32>,
    /// The beginnings of the second calls in the backward, in order.
    again: Vec<u32>,
    /// The latest start of a backward among the second calls so far that share one checkpoint. A second call
    /// that begins before this allocation shares the checkpoint, too.
    shared_until: u32,
    /// For each module whose last call's backward had begun when the step ran out of memory: the end of that call,
    /// and the beginning of the backward.
    begun_at_oom: FxHashMap<Symbol, (u32, u32)>,
}

impl<'a> Recomputed<'a> {
    fn life(&self, index: u32) -> &'a Life {
        &self.step.lives[index as usize]
    }

    fn find_first_saved(&mut self) {
        for life in self.step.lives.iter().filter(|life| !life.is_older) {
            let Some(op) = self.backward_of(life) else { continue };
            for module in self.above.around(op.module) {
                let first = self.first_saved.entry(*module).or_insert(life.birth);
                *first = life.birth.min(*first);
            }
        }
    }

    /// Finds the calls whose backward had begun when the step ran out of memory. It may have freed no block yet,
    /// but with a checkpoint, its second forward has run.
    fn find_begun_at_oom(&mut self, calls: &[&StepCall]) {
        let Some(oom) = self.oom else { return };
        let mut ends: FxHashMap<Symbol, u32> = FxHashMap::default();
        for call in calls {
            let end = ends.entry(call.name).or_default();
            *end = call.to.max(*end);
        }
        let request = self.step.allocations[oom as usize].owner;
        let ops = self.step.ops.iter().map(|op| (op.phase, op.module, op.from));
        for (phase, module, from) in ops.chain([(request.phase, request.module, oom)]) {
            if phase != self.phases.backward || from > oom {
                continue;
            }
            for name in self.above.around(module) {
                if let Some(end) = ends.get(name).copied().filter(|end| *end <= from) {
                    let begun = self.begun_at_oom.entry(*name).or_insert((end, from));
                    begun.1 = begun.1.min(from);
                }
            }
        }
    }

    /// Returns the backward function that freed a block, if a backward function did.
    fn backward_of(&self, life: &Life) -> Option<&'a StepCall> {
        let op = self.step.op(life.freed_by)?;
        (life.death != ALIVE && op.phase == self.phases.backward).then_some(op)
    }

    fn is_freed_inside(&mut self, life: &Life, call: &StepCall) -> bool {
        self.backward_of(life).is_some_and(|op| self.above.around(op.module).contains(&call.name))
    }

    /// Returns true if the forward of `call` left the block for a backward that never came: the step ran out
    /// of memory after the forward, and no op freed the block.
    fn is_left_at_oom(&self, life: &Life, call: &StepCall) -> bool {
        self.oom
            .is_some_and(|oom| call.to <= oom && life.death > oom && self.step.op(life.freed_by).is_none())
    }

    /// Returns true if `call` is a second call whose module already has its own checkpoint, so that nothing
    /// changes for it. Must be called for the calls in order.
    ///
    /// The backward of such a call begins (at `backward`) before the next second call begins. The call itself
    /// begins after the backwards of all calls that share a checkpoint.
    fn has_own_checkpoint(&mut self, call: &StepCall, backward: u32) -> bool {
        if call.phase != self.phases.backward {
            return false;
        }
        let next = self.again.partition_point(|from| *from < call.to);
        let is_shared =
            call.from < self.shared_until || self.again.get(next).is_some_and(|from| *from < backward);
        if is_shared {
            self.shared_until = self.shared_until.max(backward);
        }
        !is_shared
    }

    fn recompute(&mut self, curve: &mut Curve, call: &StepCall) -> bool {
        let step = self.step;
        let allocations = &step.allocations[call.from as usize..call.to as usize];
        let born: Vec<u32> = allocations.iter().filter_map(|allocation| allocation.life).collect();
        let mut kept = Kept { inner: Vec::new(), born };
        for index in &kept.born {
            let life = self.life(*index);
            let is_kept = life.death > call.to && is_result(life);
            if is_kept && (self.is_freed_inside(life, call) || self.is_left_at_oom(life, call)) {
                kept.inner.push(*index);
            }
        }
        keep_output(&mut kept, step, call);
        let Some(last) = kept.inner.last().map(|index| self.life(*index)) else { return false };
        let begun = self.begun_at_oom.get(&call.name).filter(|(end, _)| *end == call.to).map(|(_, at)| *at);
        let begun = begun.filter(|_| self.is_left_at_oom(last, call));
        if self.is_left_at_oom(last, call) && begun.is_none() {
            if self.has_own_checkpoint(call, self.oom.unwrap_or(ALIVE)) {
                return false;
            }
            for index in &kept.inner {
                curve.set_lives(*index, &[(self.life(*index).birth, call.to)]);
            }
            return true;
        }
        // The backward of the call begins with the first op that frees an inner block.
        let begin = |life: &Life| step.op(life.freed_by).map_or(life.death, |op| op.from);
        let inner = || kept.inner.iter().map(|index| &step.lives[*index as usize]);
        let Some(at) = begun.or_else(|| inner().map(begin).min()) else { return false };
        if self.has_own_checkpoint(call, at) {
            return false;
        }
        let end = inner().map(|life| life.death).max().unwrap_or(at);
        for index in &kept.inner {
            let life = self.life(*index);
            let death = self.end_of_use(life);
            curve.set_lives(*index, &[(life.birth, call.to), (at.min(death), death)]);
        }
        // The second forward stops after the last tensor that the backward needs. Add its highest total for a
        // moment.
        let again = kept.born.iter().filter(|index| self.life(**index).birth <= last.birth);
        let spans = again.map(|index| (self.life(*index), curve.sizes[*index as usize]));
        let highest = highest(spans.map(|(life, bytes)| (life.birth, life.death, bytes)));
        let left: i64 =
            kept.inner.iter().map(|index| curve.sizes[*index as usize]).fold(0, i64::wrapping_add);
        let owner = allocations[0].owner;
        curve.add_spike(at, highest.wrapping_sub(left), Owner { phase: self.phases.backward, ..owner });
        if self.first_saved.get(&call.name).is_none_or(|first| *first >= call.from) {
            self.keep_inputs(curve, call, end);
        }
        true
    }

    /// Returns the time at which a block of the second forward is freed, which is when the backward function
    /// that needs it returns. In the run, autograd frees a saved block only after it has summed the
    /// function's gradients to the shapes of its inputs, so those sums are subtracted.
    fn end_of_use(&mut self, life: &Life) -> u32 {
        let Some(op) = self.step.op(life.freed_by) else { return life.death };
        let sums = *self.sums.entry(life.freed_by).or_insert_with(|| {
            let own = self.step.allocations_of(life.freed_by).iter().rev();
            own.take_while(|allocation| allocation.owner.op == self.sum).count() as u32
        });
        life.death.min(op.to - sums)
    }

    /// Extends the lifetime of the inputs of a call that neither the call nor its caller keeps. A checkpoint
    /// keeps its inputs until `end`, which is the end of the call's backward.
    fn keep_inputs(&self, curve: &mut Curve, call: &StepCall, end: u32) {
        // `frees` is in order of time, so the blocks that are freed during the call are adjacent.
        let frees = &self.step.frees;
        let from = frees.partition_point(|index| self.life(*index).death <= call.from);
        for index in &frees[from..] {
            let life = self.life(*index);
            if life.death > call.to {
                break;
            }
            let phase = if call.phase == self.phases.backward { call.phase } else { self.phases.forward };
            let is_input =
                !life.is_older && life.birth < call.from && life.owner.phase == phase && life.call != NO_CALL;
            if is_input {
                curve.set_lives(*index, &[(life.birth, end)]);
            }
        }
    }
}

/// Returns true for a block that a second forward can compute again. A forward also allocates blocks that a
/// checkpoint does not free: parameters that FSDP gathers, a cache of keys and values, and the workspaces of cuBLAS.
fn is_result(life: &Life) -> bool {
    use Category::{Buffer, Gradient, KvCache, OptimizerState, Parameter, Workspace};
    let category = life.owner.category;
    !matches!(category, Parameter | Buffer | KvCache | Gradient | OptimizerState | Workspace)
}

/// Removes the result of the call from its inner blocks, because the caller holds the result.
///
/// Usually a later module frees the result, so it is no inner block. But the call's own backward may need it,
/// too (the result of a ReLU or an LSTM), and then the first backward function frees it. Among the blocks
/// that this function frees, the result is the first block of the last forward op.
fn keep_output(kept: &mut Kept, step: &RecordedStep, call: &StepCall) {
    let life = |index: &u32| &step.lives[*index as usize];
    // All inner blocks outlive the call. If further blocks outlive it, the result is one of those and not an
    // inner block.
    let outliving =
        kept.born.iter().filter(|index| life(index).death > call.to && is_result(life(index))).count();
    if outliving > kept.inner.len() {
        return;
    }
    let Some(first) = kept.inner.iter().map(|index| life(index).freed_by).min() else { return };
    let freed: Vec<u32> = kept.inner.iter().copied().filter(|index| life(index).freed_by == first).collect();
    let op = freed.iter().map(|index| life(index).call).max();
    let output = freed.into_iter().find(|index| Some(life(index).call) == op);
    kept.inner.retain(|index| Some(*index) != output);
}
