//! The evidence by which the causes are judged, in bytes. Remarks and remedies may also read the replay, through
//! `OomCase::oom_state`.
//!
//! The evidence is gathered once (`gather.rs`), so unit tests of the causes need no trace.

use std::collections::BTreeSet;

use memtrace_trace::Category;

use super::eval_mode::EvaluationGraph;
use super::grown_model::GrownModel;
use super::layers_left::LayersLeft;
use super::limits::{FEWEST_STEPS, LARGER_STEP, MATERIAL, USUAL_CONTEXT};
use crate::state::block::Block;
use crate::state::retained::Holder;

/// The evidence about an OOM.
#[derive(Clone, Debug, Default)]
pub(super) struct Evidence {
    pub(super) request: FailedRequest,
    pub(super) device: DeviceUse,
    pub(super) torch: TorchMemory,
    pub(super) live: LiveMemory,
    pub(super) steps: StepHistory,
    pub(super) forwards: ForwardHistory,
    pub(super) evaluation: Evaluation,
    pub(super) to_come: ToCome,
    /// The holders that the search at the OOM found: retained holders first.
    pub(super) holders: Vec<Holder>,
}

/// The request that failed.
#[derive(Clone, Debug, Default)]
pub(super) struct FailedRequest {
    /// True if `--phantom-fault` made the request fail.
    pub(super) is_injected: bool,
    /// The rounded size.
    pub(super) bytes: i64,
    /// The size of the segment that torch would allocate for the request.
    pub(super) segment: i64,
    /// The number of CUDA calls that failed for this request.
    pub(super) failed_calls: u64,
    /// The step; -1 before the first.
    pub(super) step: i64,
    /// True if the request is for the result of `aten::cat` outside of modules, which joins tensors of the
    /// script.
    pub(super) is_join: bool,
    /// True if the request is in the optimizer's step.
    pub(super) is_in_update: bool,
    /// True if the request is in a module's forward.
    pub(super) is_in_forward: bool,
}

/// The users of the device's memory.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceUse {
    /// The memory of the device; 0 if unknown.
    pub(super) capacity: i64,
    /// The traced memory of this process outside torch's allocator.
    pub(super) outside: i64,
    /// The memory of other processes.
    pub(super) others: i64,
    /// True if the driver does not report `others`. It is then the untraced memory beyond a large context.
    pub(super) are_others_guessed: bool,
    /// The host memory of this process; `None` if the device has its own memory.
    pub(super) host: Option<i64>,
    /// The memory for which no row accounts, excluding `others` and `host`.
    pub(super) unknown: i64,
    /// The free memory of the device; without a sample, an upper bound.
    pub(super) room: i64,
    /// True if the trace has a sample of the free memory.
    pub(super) is_sampled: bool,
    /// The device memory that the run needed, if it was measured.
    pub(super) needed: Option<i64>,
}

/// The memory of torch's allocator.
#[derive(Clone, Debug, Default)]
pub(super) struct TorchMemory {
    pub(super) allocated: i64,
    pub(super) reserved: i64,
    /// The free pieces in torch's segments for requests of this kind, the largest first. All of them may be
    /// too small.
    pub(super) holes: Vec<i64>,
    /// The free memory in private pools, which this request may not use.
    pub(super) private: i64,
}

/// The live blocks, by the role of their memory.
#[derive(Clone, Debug, Default)]
pub(super) struct LiveMemory {
    /// Autograd's graphs: activations and temporaries.
    pub(super) activations: i64,
    /// The largest activation. In the backward, its gradient has as many bytes.
    pub(super) largest_result: i64,
    /// The parameters; with FSDP, this rank's shards and what it has gathered.
    pub(super) parameters: i64,
    /// The parameters that were allocated after training began.
    pub(super) copies: Copies,
    /// The state of optimizers, if at least [`FEWEST_STEPS`] steps allocated it, as in a program that creates
    /// an optimizer again and keeps the old ones.
    pub(super) states: Option<Copies>,
    /// The blocks from before the first step that are no parameters, such as averaged weights.
    pub(super) other_lasting: i64,
    /// Batches on the device.
    pub(super) inputs: i64,
    pub(super) kv_cache: i64,
    /// The graph that an attempt left when it ran out of memory, before another attempt made this request.
    pub(super) of_failed_attempt: i64,
}

/// The earlier steps.
#[derive(Clone, Debug, Default)]
pub(super) struct StepHistory {
    pub(super) finished: Vec<StepTotals>,
    /// The bytes that were allocated when the step of the request began.
    pub(super) began: i64,
    /// Earlier steps whose graph this step still needs: it has not called their models again.
    pub(super) continued: BTreeSet<i64>,
    /// The growth of the trained parameters themselves.
    pub(super) grown_model: Option<GrownModel>,
}

/// The allocated bytes of a finished step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepTotals {
    /// The allocated bytes when the step began.
    pub(super) began: i64,
    /// The allocated bytes when the step ended.
    pub(super) ended: i64,
    /// The maximum within the step.
    pub(super) peak: i64,
    /// The maximum outside of the optimizer's step, whose first run allocates its state.
    pub(super) peak_before_update: i64,
    /// The bytes of the parameters when the step ended.
    pub(super) parameters: i64,
}

/// The forwards and backwards so far.
#[derive(Clone, Debug, Default)]
pub(super) struct ForwardHistory {
    /// The number of forwards since the last backward began, of the root module with the most such forwards.
    pub(super) count: u64,
    /// The bytes that these forwards have left allocated, not counting the last one.
    pub(super) left: i64,
    /// The maximum number of such forwards before a backward in earlier steps; 0 if no backward ran.
    pub(super) usual: u64,
    /// True if a backward has run.
    pub(super) has_backward: bool,
    /// True if autograd may be enabled; false if a complete search at the OOM found no graph of autograd.
    pub(super) has_autograd: bool,
}

/// What is known about evaluation mode.
#[derive(Clone, Debug, Default)]
pub(super) struct Evaluation {
    /// True if the request is in a forward in evaluation mode of a model that was trained before.
    pub(super) is_now: bool,
    /// A model that keeps a graph in evaluation mode, if its memory is a significant share of the card.
    pub(super) graph: Option<EvaluationGraph>,
}

/// Estimates of the memory that the program has yet to allocate after the request.
#[derive(Clone, Debug, Default)]
pub(super) struct ToCome {
    /// The bytes that this step has yet to allocate. In a forward, these are the bytes of the layers that
    /// were not reached, if they take as much as the layers before. In the optimizer's step, they are the
    /// bytes of the remaining state.
    pub(super) bytes: i64,
    /// The part of `bytes` that is state of the optimizer.
    pub(super) state: i64,
    /// The bytes of the request, if it is for state of the optimizer in its step. `bytes` does not include them.
    pub(super) requested_state: i64,
    /// The part of `bytes` that is parameters of a model that the program moves to the GPU.
    pub(super) parameters: i64,
    /// The repeated layers that the forward had not reached.
    pub(super) layers: Option<LayersLeft>,
    /// The temporary results of the optimizer's step, for a request in this step after all of its state was
    /// allocated.
    pub(super) step_temporaries: i64,
    /// The temporary results that the optimizer's step will allocate once its state is allocated, if the
    /// state itself does not fit.
    pub(super) temporaries: i64,
    /// The bytes by which memory rises after this request, from the same request of the previous forward and
    /// backward; `None` without such a request.
    pub(super) rise: Option<i64>,
    /// The state that the optimizer has yet to allocate, if the request is in the first step, before the
    /// optimizer's. The next step needs it in addition to all that this one needs.
    pub(super) of_optimizer: StateToCome,
}

/// The state that an optimizer will allocate in its first step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StateToCome {
    /// The root whose parameters it trains.
    pub(super) root: String,
    /// The bytes. For an unknown optimizer, Adam's bytes.
    pub(super) bytes: i64,
    /// The bytes of the gradients of all parameters that it trains.
    pub(super) gradients: i64,
    /// The bytes of the temporary results of its step for all parameters at once: Adam's, unless it is fused.
    pub(super) temporaries: i64,
    /// The name of its class; `None` if no optimizer of this model was found.
    pub(super) class: Option<String>,
}

/// Live parameters, or state of optimizers, that were allocated after training began, as by a program that
/// copies its model in each step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies {
    pub(super) bytes: i64,
    /// The number of steps in which they were allocated.
    pub(super) steps: usize,
}

impl Copies {
    pub(super) fn count(live: &[Block], category: Category) -> Copies {
        let late = || live.iter().filter(|b| b.owner.category == category && b.owner.step >= 0);
        let steps: BTreeSet<i64> = late().map(|block| block.owner.step).collect();
        Copies { bytes: late().map(|block| block.bytes).sum(), steps: steps.len() }
    }
}

impl DeviceUse {
    /// Returns the bytes by which the CUDA context and untraced libraries exceed their usual size, which is
    /// at most [`USUAL_CONTEXT`].
    pub(super) fn large_context(&self) -> i64 {
        (self.unknown - USUAL_CONTEXT).max(0)
    }

    /// Returns the memory outside torch's blocks that the program needs.
    pub(super) fn beside(&self) -> i64 {
        self.outside + self.unknown + self.host.unwrap_or(0)
    }

    /// Returns the measured need of the run, if it exceeds the card.
    pub(super) fn needed_too_much(&self) -> Option<i64> {
        self.needed.filter(|needed| *needed > self.capacity)
    }
}

impl TorchMemory {
    /// Returns the free memory in the allocator's cache.
    pub(super) fn cached(&self) -> i64 {
        (self.reserved - self.allocated).max(0)
    }

    /// Returns the largest free piece in the cache that the request could use.
    pub(super) fn largest_hole(&self) -> i64 {
        self.holes.first().copied().unwrap_or(0)
    }

    /// Returns true if most of the free memory in the cache is in private pools.
    pub(super) fn is_private(&self) -> bool {
        2 * self.private > self.cached()
    }
}

impl Evidence {
    /// Returns the bytes that the request lacked: its segment minus the free memory of the device.
    pub(super) fn lacking(&self) -> i64 {
        (self.request.segment.max(self.request.bytes) - self.device.room).max(0)
    }

    /// Returns the bytes in torch's blocks with the request.
    pub(super) fn with_request(&self) -> i64 {
        self.torch.allocated + self.request.bytes
    }

    /// Returns the bytes that this step has taken so far, with the request.
    pub(super) fn taken_by_step(&self) -> i64 {
        self.with_request() - self.steps.began
    }

    /// Returns a lower bound of the memory that the program needs: the memory that it held when the request
    /// failed, plus the request.
    pub(super) fn needs_at_least(&self) -> i64 {
        self.with_request() + self.device.beside()
    }

    /// Returns the memory that this step needs if it takes as much as the smallest earlier step; 0 if no step
    /// has finished. The result is a lower bound.
    pub(super) fn needs_by_earlier_steps(&self) -> i64 {
        // A step that continues an earlier one, after the step of another optimizer, is not like it.
        if !self.steps.continued.is_empty() {
            return 0;
        }
        let heights = self.steps.finished.iter().map(|step| step.peak_before_update - step.began);
        heights.min().map_or(0, |least| self.steps.began + least + self.device.beside())
    }

    /// Returns a lower bound of the memory that this step needs, including the estimate of the memory that it
    /// has yet to allocate.
    pub(super) fn needs_in_all(&self) -> i64 {
        (self.needs_at_least() + self.to_come.bytes).max(self.needs_by_earlier_steps())
    }

    /// Returns an estimate of the bytes by which the card is too small for whole steps, with the memory of the
    /// optimizer that is not allocated yet.
    pub(super) fn short_of_whole_step(&self) -> i64 {
        if self.device.needed_too_much().is_some() {
            return self.short();
        }
        let ToCome { bytes, temporaries, of_optimizer, .. } = &self.to_come;
        let whole = self.needs_at_least() + bytes + temporaries + of_optimizer.bytes;
        whole.max(self.needs_by_update()).saturating_sub(self.device.capacity).max(self.short())
    }

    /// Returns the memory that the optimizer's first step needs: the gradients of all trained parameters, but no
    /// activations. Returns 0 if the optimizer's state is not to come. Checkpoints, a smaller batch and autocast
    /// do not lower this need.
    pub(super) fn needs_by_update(&self) -> i64 {
        let StateToCome { bytes, gradients, temporaries, .. } = self.to_come.of_optimizer;
        let beside = self.live.other_lasting + self.device.beside();
        if gradients == 0 { 0 } else { self.live.parameters + gradients + bytes + temporaries + beside }
    }

    /// Returns a lower bound of the bytes by which the program is short of memory.
    pub(super) fn short(&self) -> i64 {
        self.device
            .needed
            .unwrap_or(0)
            .max(self.needs_in_all())
            .saturating_sub(self.device.capacity)
            .max(self.lacking() - self.torch.cached())
            .max(1)
    }

    /// Returns true if this many bytes are at least one part in `parts` of the card. If its size is unknown,
    /// the reserved memory counts instead, as in [`Evidence::is_material`].
    pub(super) fn is_part(&self, bytes: i64, parts: i64) -> bool {
        parts * bytes >= self.device.capacity.max(self.torch.reserved).max(1)
    }

    pub(super) fn is_material(&self, bytes: i64) -> bool {
        bytes as f64 >= MATERIAL * self.device.capacity.max(self.torch.reserved) as f64
    }

    /// Returns true if memory would hold the request and is a significant share of the card.
    pub(super) fn is_enough(&self, bytes: i64) -> bool {
        bytes >= self.lacking() && self.is_material(bytes)
    }

    /// Returns true if nothing tells how much memory the rest of this step takes: no earlier step has ended,
    /// or this step is larger than all of them, and neither repeated layers nor an optimizer's state give an
    /// estimate.
    pub(super) fn is_rest_open(&self) -> bool {
        // Without a graph, a layer keeps nothing, so it cannot predict the next layer.
        let is_estimated = self.request.is_in_update
            || self.to_come.rise.is_some()
            || self.to_come.bytes > 0 && self.forwards.has_autograd;
        self.is_larger_than_before() || self.steps.finished.is_empty() && !is_estimated
    }

    /// If this step took much more memory than each earlier step, returns the most that an earlier step took.
    /// Otherwise, or if fewer than [`FEWEST_STEPS`] steps have ended, returns `None`.
    pub(super) fn larger_step(&self) -> Option<i64> {
        let is_larger = self.steps.finished.len() >= FEWEST_STEPS && self.is_larger_than_before();
        self.steps.usual_height().filter(|_| is_larger)
    }

    /// Returns true if this step took much more than each earlier step.
    pub(super) fn is_larger_than_before(&self) -> bool {
        self.steps
            .usual_height()
            .is_some_and(|usual| self.taken_by_step() as f64 > LARGER_STEP * usual as f64)
    }
}

impl StepHistory {
    /// Returns the most memory that a finished step took, or `None` if no step has finished.
    fn usual_height(&self) -> Option<i64> {
        self.finished.iter().map(|step| step.peak - step.began).max()
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_evidence::GIB;
    use super::*;

    #[test]
    fn oom_counts_the_gradients_of_a_first_update() {
        // The forward of a large model runs out of memory at its beginning: 12 GiB of parameters need as many
        // gradients in the optimizer's step, and twice as much state.
        let of_optimizer = StateToCome { bytes: 24 * GIB, gradients: 12 * GIB, ..StateToCome::default() };
        let first = Evidence::default().with(|e| {
            e.torch.allocated = 12 * GIB;
            e.live.parameters = 12 * GIB;
            e.device.capacity = 13 * GIB;
            e.torch.reserved = 13 * GIB;
            e.device.unknown = GIB / 2;
            e.request.bytes = GIB;
            e.request.segment = GIB;
            e.to_come.of_optimizer = of_optimizer;
        });
        assert_eq!(first.short_of_whole_step(), 48 * GIB + GIB / 2 - 13 * GIB);
        // Averaged weights and the optimizer's temporary results are live in its step, too.
        let temporaries = StateToCome { temporaries: 12 * GIB, ..first.to_come.of_optimizer.clone() };
        let average = first.with(|e| {
            e.live.other_lasting = 12 * GIB;
            e.to_come.of_optimizer = temporaries;
        });
        assert_eq!(average.needs_by_update() - first.needs_by_update(), 24 * GIB);
        // With more activations than gradients, the next step's forward needs most.
        let much = first.with(|e| e.torch.allocated = 30 * GIB);
        assert_eq!(much.short_of_whole_step(), 55 * GIB + GIB / 2 - 13 * GIB);
    }
}
