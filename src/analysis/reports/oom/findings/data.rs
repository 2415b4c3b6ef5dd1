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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A training in step 3, in which the search at the OOM finds a variable.
    fn trace(parameters: i64, holder: Value) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.parameter(parameters, "Net");
        trace.block(6 * GIB, owner("(script)", "init", -1));
        trace.fill(512 * MIB, owner("Net", "forward", 3));
        trace.fails(GIB, owner("Net", "forward", 3));
        trace.found(&[holder]);
        trace
    }

    #[test]
    fn oom_advises_to_keep_data_on_the_cpu() {
        let data = |tensors: i64| json!({ "tensors": tensors, "first_step": -1, "last_step": -1 });
        trace(GIB, data(2)).prints(&[
            "try: keep it on the CPU if it is data, and copy one batch at a time (.cuda() in the loop; a queue of batches needs a \
             maxsize): variable `x` (train.py:7) keeps 2 tensors, 6.00 GiB from before training",
        ]);
        let never = |parameters: i64, holder: Value| {
            trace(parameters, holder).never_prints("keep it on the CPU if it is data");
        };
        // As large as the parameters; many tensors, which may be two copies of the parameters.
        never(6 * GIB, data(2));
        never(3 * GIB, data(40));
        // Made in a step; a graph; a variable of the forward; a small share of the card.
        never(GIB, json!({ "tensors": 2, "first_step": 3, "last_step": 3 }));
        never(GIB, json!({ "tensors": 2, "first_step": -1, "last_step": -1, "graphs": 1 }));
        never(GIB, json!({ "tensors": 2, "first_step": -1, "last_step": -1, "owner": "Net.forward" }));
        never(GIB, json!({ "tensors": 2, "first_step": -1, "last_step": -1, "bytes": 2 * GIB }));
    }
}
