//! The temporary memory of another optimizer's step. The sizes of its state are in [`super::sizes`].

use memtrace_trace::Category;

use super::changes::{Change, NewOptimizer};
use super::curve::Curve;
use super::step::RecordedStep;
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// Returns the number of blocks of optimizer state in a step.
pub(super) fn states(step: &RecordedStep) -> u64 {
    step.lives.iter().filter(|life| life.owner.category == Category::OptimizerState).count() as u64
}

/// Adds the temporary memory that a step of `optimizer` needs after the backward pass. Returns the number of
/// blocks of state.
///
/// `torch.optim.Adafactor` steps one parameter after the other, and its update has the parameter's size. The
/// previous parameter's update is still live when the next one is allocated. SGD and 8-bit kernels work in
/// place, so they need no temporary memory.
pub(super) fn apply(
    curve: &mut Curve,
    step: &RecordedStep,
    optimizer: NewOptimizer,
    changes: &[Change],
    phases: &Phases,
) -> u64 {
    let states = states(step);
    if optimizer != NewOptimizer::Adafactor || changes.contains(&Change::StepInBackward) {
        return states;
    }
    let (Some(at), Some(last)) = (step.optimizer_at, step.allocations.last()) else { return states };
    let parameters: Vec<i64> = step
        .lives
        .iter()
        .enumerate()
        .filter(|(_, life)| life.owner.category == Category::Parameter)
        .map(|(index, _)| curve.sizes[index])
        .collect();
    let pair = parameters.windows(2).map(|two| two[0].wrapping_add(two[1])).max();
    let bytes = pair.or(parameters.first().copied()).unwrap_or(0);
    curve.add_spike(at, bytes, Owner { phase: phases.optimizer, ..last.owner });
    states
}
