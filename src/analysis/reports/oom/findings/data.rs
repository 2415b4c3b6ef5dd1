//! Data that the program keeps on the GPU from before training.

use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use super::super::retained_holders::is_of_forward;
use super::copies::FEWEST_OF_STATE;
use crate::state::retained::Holder;

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    // One or a few large tensors that are not a copy of the parameters, or many tensors that are far larger
    // than a copy.
    let is_it = |holder: &&Holder| {
        let parameters = case.evidence.live.parameters;
        let least = if holder.tensors < FEWEST_OF_STATE { parameters } else { 2 * parameters };
        holder.graphs == 0
            && holder.last_step.is_some_and(|last| last < 0)
            && holder.tensors > 0
            && case.evidence.is_material(holder.bytes)
            && holder.bytes > least
            && !is_of_forward(holder)
    };
    let data = case.evidence.holders.iter().find(is_it)?;
    Some(format!(
        "keep it on the CPU if it is data, and copy one batch at a time (.cuda() in the loop; a queue of batches needs a maxsize): {}",
        data.line(units)
    ))
}
