//! Copies of the model that were made in several steps and are kept.

use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::{Blame, Cause, GROWS, Help, OomCase};
use super::super::kept_reasons::{Kept, words};
use super::super::retained_holders::FEWEST_GATHERED;
use crate::render::numbers::{counted, upper_first};
use crate::state::retained::Holder;

/// The minimum number of tensors in a copy of a model's weights.
pub(super) const FEWEST_OF_STATE: i64 = 8;

pub(super) static CAUSE: Cause = Cause {
    verdict: GROWS,
    find: |evidence| {
        let of_copies = evidence.holders.iter().filter(|holder| is_of_copies(evidence, holder));
        let kept = of_copies.max_by_key(|holder| holder.bytes).map(|holder| (holder.clone(), Kept::Copies));
        are_kept(evidence).then_some(Blame { cause: &CAUSE, kept })
    },
    because,
    tries: |_| words(Kept::Copies).tries.to_vec(),
    help: Help::FreeKept,
    ..Cause::DEFAULT
};

fn because(case: &OomCase<'_>, units: Unit) -> String {
    let copies = case.evidence.live.copies;
    let holder = case.blame.kept.as_ref();
    let holder = holder.map(|(holder, _)| format!(". {}", upper_first(&holder.kept(units))));
    format!(
        "parameters of {} were allocated in {}: copies of the model are kept{}",
        units.show(copies.bytes),
        counted(copies.steps as u64, "step"),
        holder.unwrap_or_default()
    )
}

/// Returns true if parameters that were allocated in several steps take a significant share of the card.
pub(super) fn are_kept(evidence: &Evidence) -> bool {
    evidence.live.copies.steps > 1 && evidence.is_material(evidence.live.copies.bytes)
}

/// Returns true if a holder has at least half of the copies of a model, and little else.
pub(super) fn is_of_copies(evidence: &Evidence, holder: &Holder) -> bool {
    let copies = evidence.live.copies.bytes;
    let is_most = 2 * holder.bytes >= copies && holder.bytes <= 2 * copies;
    are_kept(evidence) && holder.graphs == 0 && holder.tensors >= FEWEST_GATHERED && is_most
}

/// Returns true if a holder has about as many bytes of each step as the model has parameters, in many
/// tensors, such as a list of `state_dict` copies.
pub(super) fn has_state_of_each_step(evidence: &Evidence, holder: &Holder) -> bool {
    let (bytes, tensors) = (holder.bytes / holder.steps.max(1), holder.tensors / holder.steps.max(1));
    // Copies count as parameters, too, and may have been made in each step.
    let of_model = evidence.live.parameters - evidence.live.copies.bytes;
    holder.graphs == 0 && tensors >= FEWEST_OF_STATE && (bytes - of_model).abs() <= of_model / 4
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Category;
    use serde_json::json;

    use super::super::super::test_evidence::{GIB, MIB, full, holder};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::reports::oom::evidence::Copies;

    #[test]
    fn oom_names_the_holder_of_copies_of_the_model() {
        let copies = Copies { bytes: 5 * GIB, steps: 4 };
        let bank = holder(json!({ "tensors": 96, "bytes": 5 * GIB, "last_step": 3 }));
        let facts = full().with(|e| {
            e.request.step = 4;
            e.live.copies = copies;
            e.holders = vec![bank];
        });
        let why = |facts: &Evidence| facts.judge().kept.map(|(holder, why)| (holder.bytes, why));
        assert_eq!((facts.verdict(), why(&facts)), ("memory grows", Some((5 * GIB, Kept::Copies))));
        // The search has seen the holder grow, so its numbers are no results that .item() would make smaller.
        let grows = holder(json!({ "tensors": 96, "bytes": 5 * GIB, "last_step": 3, "verdict": "grows" }));
        let grown = facts.with(|e| e.holders = vec![grows]);
        assert_eq!((grown.verdict(), why(&grown)), ("memory grows", Some((5 * GIB, Kept::Copies))));
        // No holder of the copies: a small part of them, and far more than they take.
        for bytes in [GIB, 12 * GIB] {
            let other = holder(json!({ "tensors": 96, "bytes": bytes, "last_step": 3 }));
            let found = facts.with(|e| e.holders = vec![other]);
            assert_eq!((found.verdict(), why(&found)), ("memory grows", None));
        }
    }

    /// Steps that each keep a copy of the model, of `bytes`, and then one that fails.
    fn trace(bytes: i64, holder: serde_json::Value) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.parameter(GIB, "Net");
        for step in 1..4 {
            trace.tagged(bytes, Category::Parameter, owner("(script)", "(none)", step));
        }
        trace.fill(512 * MIB, owner("Net", "forward", 4));
        trace.fails(GIB, owner("Net", "forward", 4));
        trace.found(&[holder]);
        trace
    }

    #[test]
    fn oom_says_that_copies_of_the_model_are_kept() {
        let bank = |bytes: i64| json!({ "tensors": 96, "bytes": bytes, "first_step": 1, "last_step": 3 });
        trace(GIB, bank(3 * GIB)).prints(&[
            "verdict: memory grows: 512.00 MiB missing for this request. Parameters of 3.00 GiB were allocated in 3 steps: copies of the \
             model are kept. Variable `x` (train.py:7) keeps 96 tensors, 3.00 GiB of steps 1-3.",
            "try: keep copies on the CPU (copy.deepcopy(model).cpu(), or its state_dict() moved there), or one that is updated in place",
        ]);
        trace(256 * MIB, bank(768 * MIB)).never_prints("copies of the model");
    }
}
