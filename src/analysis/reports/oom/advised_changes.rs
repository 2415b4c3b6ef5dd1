//! The changes of `memtrace advise` as they apply to an OOM.

use memtrace_trace::units::Unit;

use super::super::advise::predictions::FirstAdvice;
use super::evidence::ToCome;
use super::finding::{OomCase, UNSURE, code_of};
use super::findings::running_forward;
use super::limits::{
    LEAST_OF_SHORT, LEAST_SAVING, LEAST_SAVING_IN_LARGER_STEP, LEAST_SAVING_IN_OPTIMIZER, part_of,
};
use crate::whatif::{Change, NewOptimizer};

impl OomCase<'_> {
    /// Returns true if the memory of the rest of this forward cannot be estimated, because no step has ended
    /// and no repeated layers are left.
    pub(super) fn is_rest_unknown(&self) -> bool {
        let evidence = &self.evidence;
        // Without a graph, a layer keeps nothing, so it cannot predict the next layer.
        let is_estimated = evidence.to_come.bytes > 0 && evidence.forwards.has_autograd;
        evidence.steps.finished.is_empty()
            && !is_estimated
            && !["backward", "optimizer"].contains(&&*self.oom_state.phase())
    }

    /// Returns the bytes that a change must save so that the rest of the step certainly fits.
    fn least_saving(&self) -> i64 {
        let evidence = &self.evidence;
        if evidence.is_larger_than_before() {
            part_of(evidence.torch.allocated + evidence.request.bytes, LEAST_SAVING_IN_LARGER_STEP)
        } else if self.oom_state.phase() == "optimizer" {
            part_of(evidence.torch.allocated, LEAST_SAVING_IN_OPTIMIZER)
        } else {
            part_of(evidence.torch.allocated, LEAST_SAVING)
        }
    }

    /// Returns the text that follows a saving of this many bytes: [`UNSURE`] if it may be too little.
    pub(super) fn unsure(&self, saved: i64) -> &'static str {
        if self.is_too_little_with(saved, saved) { UNSURE } else { "" }
    }

    /// Returns true if a change may be too little that saves `saved` bytes of the held memory, and `in_all`
    /// bytes with the memory that was not yet allocated.
    fn is_too_little_with(&self, saved: i64, in_all: i64) -> bool {
        let short = self.evidence.short_of_whole_step();
        self.is_rest_unknown() || in_all < part_of(short, LEAST_OF_SHORT) || saved < self.least_saving()
    }

    /// Returns the change as it applies to this case, or `None` if it saves nothing here: a checkpoint of a
    /// forward without a graph, which keeps no results. A checkpoint does not free what the forward gathers
    /// for its output.
    pub(super) fn suited(&self, mut advice: FirstAdvice) -> Option<FirstAdvice> {
        if !matches!(advice.change, Change::Checkpoint(_)) {
            return Some(advice);
        }
        let is_without_graph = self.oom_state.phase() == "forward" && !self.evidence.forwards.has_autograd;
        advice.saved -= running_forward::gathered(&self.evidence).map_or(0, |holder| holder.bytes);
        (!is_without_graph && advice.saved > 0).then_some(advice)
    }

    /// Returns the line for a change of `memtrace advise`, with the bytes that it saves here.
    pub(super) fn advised_line(&self, advice: &FirstAdvice, units: Unit) -> String {
        let (evidence, change) = (&self.evidence, &advice.change);
        let least = if advice.is_least { "at least " } else { "" };
        let saved = advice.saved.saturating_add(self.saved_of_rest(advice));
        let is_of_batch = !matches!(change, Change::Batch(..)) || evidence.larger_step().is_none();
        // What such a step allocates outside of the model does not follow the model's types.
        let is_outside =
            change.is_type() && self.oom_state.is_in_script() && evidence.larger_step().is_some();
        let enough = match evidence.device.needed.filter(|needed| *needed > evidence.device.capacity) {
            Some(_) if saved < evidence.short() => ", not enough alone",
            None if !is_of_batch => {
                ", may not be enough alone: this step's extra memory may not depend on the batch"
            }
            None if is_outside => {
                ", may not be enough alone: this step's extra memory is outside of the model"
            }
            None if self.is_too_little_with(advice.saved, saved - self.to_come_with_checkpoints(advice)) => {
                UNSURE
            }
            None if evidence.needs_by_update() > evidence.device.capacity && is_without_update(change) => {
                UNSURE
            }
            Some(_) => ", enough",
            None => ", likely enough",
        };
        // A measured need says how much a whole run saves, so nothing is added.
        let bytes = if saved - advice.saved >= advice.saved / 10 && evidence.device.needed.is_none() {
            format!(
                "about {} of a whole step ({least}{} of what is allocated now)",
                units.show(saved),
                units.show(advice.saved)
            )
        } else {
            format!("{least}{}", units.show(advice.saved))
        };
        let costs = if matches!(change, Change::Batch(..))
            && !evidence.forwards.has_autograd
            && !evidence.forwards.has_backward
        {
            "more calls"
        } else {
            &advice.costs
        };
        let code = code_of(&change.option());
        format!("{} ({code}): saves {bytes}{enough}; costs: {costs}", change.phrase())
    }

    /// Returns the bytes that the backward needs beside the second forward of a checkpointed module, if the trace
    /// has no backward: at least the gradient of the largest result.
    fn to_come_with_checkpoints(&self, advice: &FirstAdvice) -> i64 {
        let is_unknown =
            matches!(advice.change, Change::Checkpoint(_)) && !self.evidence.forwards.has_backward;
        if is_unknown { self.evidence.live.largest_result } else { 0 }
    }

    /// Returns an estimate of the bytes that a change of `memtrace advise` saves of the memory that the step
    /// has yet to allocate.
    fn saved_of_rest(&self, advice: &FirstAdvice) -> i64 {
        let evidence = &self.evidence;
        let ToCome { state, requested_state, of_optimizer, .. } = &evidence.to_come;
        let state = state + requested_state + of_optimizer.bytes;
        let (of_state, of_temporaries) = match &advice.change {
            // The optimizer has as much state as before, but steps one parameter at a time.
            Change::StepInBackward => (0, evidence.to_come.temporaries),
            Change::Optimizer(NewOptimizer::EightBit) => (state / 4 * 3, evidence.to_come.temporaries),
            Change::Optimizer(_) | Change::OffloadOptimizer => (state, evidence.to_come.temporaries),
            Change::Bfloat16 => ((state + evidence.to_come.parameters) / 2, evidence.to_come.temporaries / 2),
            _ => (0, 0),
        };
        // The layers that were not reached are assumed to shrink by the same factor as the activations so far.
        let is_of_layers =
            advice.change.is_type() || matches!(advice.change, Change::Checkpoint(_) | Change::Batch(..));
        let rest = evidence.to_come.bytes - evidence.to_come.state - evidence.to_come.parameters;
        let layers = if is_of_layers { rest } else { 0 };
        let now = evidence.live.activations.max(1);
        let of_layers = (i128::from(layers) * i128::from(advice.saved.min(now)) / i128::from(now)) as i64;
        of_layers + of_state + of_temporaries
    }
}

/// Returns true for a change that leaves the memory of the optimizer's step as it is.
fn is_without_update(change: &Change) -> bool {
    matches!(change, Change::Checkpoint(_) | Change::Batch(..) | Change::Autocast | Change::ChunkLoss(_))
}
