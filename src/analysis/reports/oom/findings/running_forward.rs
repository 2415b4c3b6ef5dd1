//! Results that the running forward gathers for its output, such as the maps of its attention.

use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::OomCase;
use super::super::retained_holders::{FEWEST_GATHERED, is_of_torch};
use crate::state::retained::Holder;

/// Returns true if a holder has results that the running forward gathers for its output: no other forward has
/// run since the last backward.
pub(super) fn is_of_running_forward(evidence: &Evidence, holder: &Holder) -> bool {
    let step = Some(evidence.request.step);
    let is_of_step = holder.first_step == step && holder.last_step == step;
    let is_alone = evidence.request.is_in_forward && evidence.forwards.count == 1;
    is_alone && is_of_step && holder.graphs == 0 && holder.tensors >= FEWEST_GATHERED
}

/// Returns the largest holder with results that the running forward gathers, if these take a significant
/// share of the card.
pub(in super::super) fn gathered(evidence: &Evidence) -> Option<&Holder> {
    let all = evidence.holders.iter().filter(|holder| is_of_running_forward(evidence, holder));
    let is_variable = |holder: &&Holder| {
        // What torch itself gathers, such as FSDP's parameters, is no output.
        let is_of_script = !is_of_torch(holder);
        is_of_script && ["local", "attribute", "global"].contains(&holder.text("kind"))
    };
    all.filter(is_variable)
        .max_by_key(|holder| holder.bytes)
        .filter(|one| evidence.is_material(one.bytes) && 2 * evidence.live.kv_cache < one.bytes)
}

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let gathered = gathered(&case.evidence)?;
    Some(format!(
        "do without the results that this forward gathers, if they are not used (output_attentions=False, output_hidden_states=False \
         in transformers): {}; checkpoints do not free them, and a variable that keeps them during the next forward doubles them",
        gathered.line(units)
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::test_evidence::{GIB, MIB, full, holder};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;

    #[test]
    fn oom_blames_no_results_that_the_running_forward_gathers() {
        // The maps of attention that a model collects for its output.
        let maps = holder(
            json!({ "tensors": 5, "first_step": 0, "last_step": 0, "bytes": 4 * GIB, "kind": "local" }),
        );
        let first = full().with(|e| {
            e.request.is_in_forward = true;
            e.forwards.count = 1;
            e.request.step = 0;
            e.holders = vec![maps.clone()];
        });
        assert_eq!(first.verdict(), "too big");
        assert_eq!(gathered(&first), Some(&maps));
        // Results of earlier forwards; a request outside of the forward; too few bytes.
        for other in [
            first.with(|e| e.forwards.count = 2),
            first.with(|e| e.request.step = 1),
            first.with(|e| e.request.is_in_forward = false),
        ] {
            assert_eq!((other.verdict(), gathered(&other)), ("memory is kept", None));
        }
        let mut few = maps;
        few.bytes = GIB;
        assert_eq!(gathered(&first.with(|e| e.holders = vec![few])), None);
    }

    #[test]
    fn oom_advises_to_do_without_what_a_forward_gathers() {
        let forwards = |calls: i64, tensors: i64| {
            let mut trace = OomTrace::new(24 * GIB);
            for _ in 0..calls {
                trace.call("Net", "Net", 0);
            }
            trace.fill(512 * MIB, owner("Net.h", "forward", 0));
            trace.fails(GIB, owner("Net.h", "forward", 0));
            trace.found(&[json!({ "tensors": tensors, "owner": "Net.forward" })]);
            trace
        };
        forwards(1, 5).prints(&[
            "try: do without the results that this forward gathers, if they are not used (output_attentions=False, \
             output_hidden_states=False in transformers): variable `x` (train.py:7) keeps 5 tensors, 6.00 GiB of step 0; checkpoints do not \
             free them, and a variable that keeps them during the next forward doubles them",
        ]);
        forwards(1, 2).never_prints("that this forward gathers");
        forwards(2, 5).never_prints("that this forward gathers");
    }
}
