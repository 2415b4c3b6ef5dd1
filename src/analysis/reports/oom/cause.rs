//! The rules that name the cause of an OOM.
//!
//! A cause is named only if its bytes are a significant share of the card or of the live memory. Growth,
//! fragmentation and another process must also cover the missing bytes of the request. A smaller cause is only a
//! remark.

use std::collections::BTreeSet;

use memtrace_trace::Category;

use super::kept::{FEWEST_GATHERED, Kept, is_of_forward};
use super::model_growth::GrownModel;
use super::step_growth::{FEWEST_STEPS, Growth, StepTotals, growth};
use crate::state::block::Block;
use crate::state::retained::Holder;

/// Memory below this share of the card is too small to be the cause of an OOM.
pub(super) const MATERIAL: f64 = 0.1;
/// If the free memory in the allocator's cache is at least this share of the card, fragmentation is preferred
/// to a doubtful holder as the cause.
const LARGE: f64 = 0.15;
/// The usual upper bound, in bytes, of a CUDA context with the code and workspaces of libraries: they take
/// 300 to 600 MiB on one GPU.
const USUAL_CONTEXT: i64 = 600 << 20;
/// Growth over at least this many steps can be the cause even if it is small, because it is not a
/// coincidence.
const MANY_STEPS: usize = 6;
/// The minimum number of tensors in a copy of a model's weights.
const FEWEST_OF_STATE: i64 = 8;

/// The cause of an OOM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// `--phantom-fault` made the request fail.
    Injected,
    /// The request alone is larger than the memory that the card can give this process.
    RequestTooLarge,
    /// The device had room, but a limit of torch forbade the allocation.
    Limit,
    /// Each step leaves memory allocated.
    Grows,
    /// The request would fit without the memory of other processes.
    OtherProcess,
    /// A holder keeps memory that the program does not need at this moment.
    Kept,
    /// Enough memory is free, but in pieces that are too small.
    Fragmentation,
    /// The request would fit without this process's memory on the host, which the device shares.
    HostMemory,
    /// The request would fit without this process's memory outside torch's allocator.
    OutsideTorch,
    /// The program needs more than the card has.
    TooBig,
}

impl Cause {
    /// Returns the verdict.
    pub(super) fn name(self) -> &'static str {
        match self {
            Cause::Injected => "injected",
            Cause::RequestTooLarge => "request too large",
            Cause::Limit => "a limit",
            Cause::Grows => "memory grows",
            Cause::OtherProcess => "another process",
            Cause::Kept => "memory is kept",
            Cause::Fragmentation => "fragmentation",
            Cause::HostMemory => "host memory",
            Cause::OutsideTorch => "outside torch",
            Cause::TooBig => "too big",
        }
    }

    /// Returns true if a lower peak would help, so that the changes of `memtrace advise` apply.
    pub(super) fn is_need(self) -> bool {
        matches!(self, Cause::TooBig | Cause::RequestTooLarge | Cause::OtherProcess | Cause::OutsideTorch)
    }
}

/// The known facts about an OOM; sizes are in bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// True if `--phantom-fault` made the request fail.
    pub(super) is_injected: bool,
    /// The memory of the device; 0 if unknown.
    pub(super) capacity: i64,
    /// The rounded size of the request.
    pub(super) request: i64,
    /// The size of the segment that torch would allocate for the request.
    pub(super) segment: i64,
    /// The allocated bytes of torch's allocator.
    pub(super) allocated: i64,
    /// The reserved bytes of torch's allocator.
    pub(super) reserved: i64,
    /// The traced memory of this process outside torch's allocator.
    pub(super) outside: i64,
    /// The known memory of other processes.
    pub(super) others: i64,
    /// The host memory of this process; `None` if the device has its own memory.
    pub(super) host: Option<i64>,
    /// The memory for which no row accounts, excluding `others` and `host`.
    pub(super) unknown: i64,
    /// The free memory of the device; without a sample, an upper bound.
    pub(super) room: i64,
    /// The largest free piece in torch's cache that the request could use.
    pub(super) largest_hole: i64,
    /// The bytes of the graph that an attempt left when it ran out of memory, before another attempt made this
    /// request.
    pub(super) of_failed_attempt: i64,
    /// Earlier steps whose graph this step still needs: it has not called their models again.
    pub(super) continued_steps: BTreeSet<i64>,
    /// The growth of the trained parameters themselves.
    pub(super) grown_model: Option<GrownModel>,
    /// The number of CUDA calls that failed for this request.
    pub(super) failed_calls: u64,
    /// The step of the request; -1 before the first.
    pub(super) step: i64,
    /// The finished steps.
    pub(super) steps: Vec<StepTotals>,
    /// The bytes that were allocated when the step of the request began.
    pub(super) step_began: i64,
    /// The number of forwards since the last backward began, of the root module with the most such forwards.
    pub(super) forwards: u64,
    /// The bytes that these forwards have left allocated, not counting the last one.
    pub(super) left_by_forwards: i64,
    /// The maximum number of such forwards before a backward in earlier steps; 0 if no backward ran.
    pub(super) usual_forwards: u64,
    /// The live memory of autograd's graphs: the bytes of activations and temporaries.
    pub(super) activations: i64,
    /// The bytes of the live parameters; with FSDP, of this rank's shards and of what it has gathered.
    pub(super) parameters: i64,
    /// The bytes of the live parameters without what FSDP has gathered.
    pub(super) shards: i64,
    /// The bytes of the largest block into which FSDP has gathered parameters.
    pub(super) largest_gather: i64,
    /// The whole parameters that FSDP has gathered: their bytes, and the number of modules.
    pub(super) gathered_modules: (i64, usize),
    /// The whole gradients that FSDP has not reduced to shards: their bytes, and the number of modules.
    pub(super) unreduced_modules: (i64, usize),
    /// The bytes of the largest live activation. In the backward, its gradient has as many.
    pub(super) largest_result: i64,
    /// The bytes of live blocks from before the first step that are no parameters, such as averaged weights.
    pub(super) other_lasting: i64,
    /// The bytes of the live inputs: batches on the device.
    pub(super) inputs: i64,
    /// The bytes of the live key-value cache.
    pub(super) kv_cache: i64,
    /// An estimate of the bytes that this step has yet to allocate. In a forward, these are the bytes of the
    /// layers that were not reached, if they take as much as the layers before. In the optimizer's step, they
    /// are the bytes of the remaining state.
    pub(super) to_come: i64,
    /// The number of live blocks that this step allocated in the same op and module as the request. If the
    /// request copies a tensor to the GPU outside of modules, these blocks are copied tensors.
    pub(super) copied: usize,
    /// The bytes that one checkpoint around several layers has recomputed for its backward.
    pub(super) recomputed: i64,
    /// The holders that the search at the OOM found, largest first.
    pub(super) holders: Vec<Holder>,
    /// True if the request is for the result of `aten::cat` outside of modules, which joins tensors of the
    /// script.
    pub(super) is_join: bool,
    /// The free memory in private pools, which this request may not use.
    pub(super) private: i64,
    /// The live parameters that were allocated after training began.
    pub(super) copies: Copies,
    /// The live state of optimizers, if at least [`FEWEST_STEPS`] steps allocated it, as in a program that
    /// creates an optimizer again and keeps the old ones.
    pub(super) states: Option<Copies>,
    /// True if autograd may be enabled; false if a complete search at the OOM found no graph of autograd.
    pub(super) has_autograd: bool,
    /// True if a backward has run.
    pub(super) has_backward: bool,
    /// The number of root modules that were called since the last backward.
    pub(super) roots: usize,
    /// The bytes of the temporary results of the optimizer's step, for a request in this step after all of
    /// its state was allocated.
    pub(super) step_temporaries: i64,
    /// An estimate of the temporary results that the optimizer's step will allocate once its state is
    /// allocated, if the state itself does not fit.
    pub(super) temporaries_to_come: i64,
    /// An estimate of the bytes by which memory rises after this request, from the same request of the previous
    /// forward and backward; `None` without such a request.
    pub(super) rise_to_come: Option<i64>,
    /// The part of `to_come` that is parameters of a model that the program moves to the GPU.
    pub(super) parameters_to_come: i64,
    /// The part of `to_come` that is state of the optimizer.
    pub(super) state_to_come: i64,
    /// True if the request is in the optimizer's step.
    pub(super) is_in_update: bool,
    /// True if the request is in a module's forward.
    pub(super) is_in_forward: bool,
    /// The state that the optimizer has yet to allocate, if the request is in the first step, before the
    /// optimizer's. The next step needs it in addition to all that this one needs.
    pub(super) of_optimizer: StateToCome,
    /// The device memory that the run needed, if it was measured.
    pub(super) needed: Option<i64>,
}

/// The state that an optimizer will allocate in its first step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StateToCome {
    /// The bytes. If the optimizer is unknown, they are those of Adam.
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
    pub(super) fn of(live: &[Block], category: Category) -> Copies {
        let late = || live.iter().filter(|b| b.owner.category == category && b.owner.step >= 0);
        let steps: BTreeSet<i64> = late().map(|block| block.owner.step).collect();
        Copies { bytes: late().map(|block| block.bytes).sum(), steps: steps.len() }
    }
}

impl Facts {
    /// Returns the free memory in the allocator's cache.
    pub(super) fn cached(&self) -> i64 {
        (self.reserved - self.allocated).max(0)
    }

    /// Returns true if most of the free memory in the cache is in private pools.
    pub(super) fn is_private(&self) -> bool {
        2 * self.private > self.cached()
    }

    /// Returns the bytes that the request lacked: its segment minus the free memory of the device.
    pub(super) fn lacking(&self) -> i64 {
        (self.segment.max(self.request) - self.room).max(0)
    }

    /// Returns a lower bound of the memory that the program needs: the memory that it held when the request
    /// failed, plus the request.
    pub(super) fn needs_at_least(&self) -> i64 {
        self.allocated + self.request + self.outside + self.unknown + self.host.unwrap_or(0)
    }

    /// Returns the memory that this step needs if it takes as much as the smallest earlier step; 0 if no step
    /// has finished. The result is a lower bound.
    pub(super) fn needs_by_earlier_steps(&self) -> i64 {
        // A step that continues an earlier one, after the step of another optimizer, is not like it.
        if !self.continued_steps.is_empty() {
            return 0;
        }
        let heights = self.steps.iter().map(|step| step.peak_before_update - step.began);
        heights
            .min()
            .map_or(0, |least| self.step_began + least + self.outside + self.unknown + self.host.unwrap_or(0))
    }

    /// Returns a lower bound of the memory that this step needs, including the estimate of the memory that it
    /// has yet to allocate.
    fn needs_in_all(&self) -> i64 {
        (self.needs_at_least() + self.to_come).max(self.needs_by_earlier_steps())
    }

    /// Returns an estimate of the bytes by which the card is too small for whole steps, with the memory of the
    /// optimizer that is not allocated yet.
    pub(super) fn short_of_whole_step(&self) -> i64 {
        if self.needed.is_some_and(|needed| needed > self.capacity) {
            return self.short();
        }
        let whole = self.needs_at_least() + self.to_come + self.temporaries_to_come + self.of_optimizer.bytes;
        whole.max(self.needs_by_update()).saturating_sub(self.capacity).max(self.short())
    }

    /// Returns the memory that the optimizer's first step needs: the gradients of all trained parameters, but no
    /// activations. Returns 0 if the optimizer's state is not to come. Checkpoints, a smaller batch and autocast
    /// do not lower this need.
    pub(super) fn needs_by_update(&self) -> i64 {
        let StateToCome { bytes, gradients, temporaries, .. } = self.of_optimizer;
        let beside = self.other_lasting + self.outside + self.unknown + self.host.unwrap_or(0);
        if gradients == 0 { 0 } else { self.parameters + gradients + bytes + temporaries + beside }
    }

    /// Returns a lower bound of the bytes by which the program is short of memory.
    pub(super) fn short(&self) -> i64 {
        self.needed
            .unwrap_or(0)
            .max(self.needs_in_all())
            .saturating_sub(self.capacity)
            .max(self.lacking() - self.cached())
            .max(1)
    }

    /// Returns the bytes by which the CUDA context and untraced libraries exceed their usual size, which is
    /// at most [`USUAL_CONTEXT`].
    pub(super) fn large_context(&self) -> i64 {
        (self.unknown - USUAL_CONTEXT).max(0)
    }

    pub(super) fn is_material(&self, bytes: i64) -> bool {
        bytes as f64 >= MATERIAL * self.capacity.max(self.reserved) as f64
    }

    /// Returns the first cause that applies, in a fixed order, and the holder that is responsible for it, if
    /// there is one.
    pub(super) fn judge(&self) -> (Cause, Option<(&Holder, Kept)>) {
        if self.is_injected {
            return (Cause::Injected, None);
        }
        let known = self.capacity > 0;
        if known && self.request > self.capacity - self.unknown {
            return (Cause::RequestTooLarge, None);
        }
        if known && self.failed_calls == 0 && self.room >= self.segment {
            return (Cause::Limit, None);
        }
        let kept = self.kept();
        let is_fragmented = self.is_fragmented();
        if let Some(found @ (_, Kept::Unused)) = kept.filter(|(holder, _)| holder.bytes >= self.lacking()) {
            return (if found.0.verdict == "grows" { Cause::Grows } else { Cause::Kept }, Some(found));
        }
        if self.has_model_grown() && !matches!(kept, Some((_, Kept::Grows))) {
            return (Cause::Grows, None);
        }
        if self.growth().is_some() || matches!(kept, Some((_, Kept::Grows))) {
            return (Cause::Grows, self.growing());
        }
        if self.are_copies_kept() {
            let holder = self.holders.iter().filter(|holder| self.is_of_copies(holder));
            let largest = holder.max_by_key(|holder| holder.bytes);
            return (Cause::Grows, largest.map(|holder| (holder, Kept::Copies)));
        }
        if self.others >= self.lacking() && self.is_material(self.others) {
            return (Cause::OtherProcess, None);
        }
        // A list may gather the results that the program exists to produce, so such a holder is doubtful.
        // Large holes are useless without doubt, but with a holder of more memory they are not the main cause.
        let holes = self.cached();
        let is_doubtful = |(holder, why): (&Holder, Kept)| {
            matches!(why, Kept::Gathered | Kept::EarlierResult) && holder.bytes <= holes
        };
        let are_holes_large = is_fragmented && holes as f64 >= LARGE * self.capacity as f64;
        if let Some(found) = kept.filter(|found| !(are_holes_large && is_doubtful(*found))) {
            return (Cause::Kept, Some(found));
        }
        if self.is_failed_attempt_kept() {
            return (Cause::Kept, None);
        }
        if is_fragmented {
            return (Cause::Fragmentation, None);
        }
        if let Some(host) = self.host.filter(|host| *host >= self.lacking() && self.is_material(*host)) {
            // Device and host share this memory. The host is named only if its memory is at least half as
            // large as torch's blocks.
            if 2 * host >= self.allocated {
                return (Cause::HostMemory, None);
            }
        }
        let beside = self.outside + self.large_context();
        if beside >= self.lacking() && self.is_material(beside) {
            return (Cause::OutsideTorch, None);
        }
        (Cause::TooBig, None)
    }

    /// Returns true if the graph of a failed attempt is still live, and the request would fit without it. A
    /// search for its holder may end at its time limit, but the graph itself is in the trace.
    fn is_failed_attempt_kept(&self) -> bool {
        self.of_failed_attempt >= self.lacking()
            && self.of_failed_attempt as f64 >= MATERIAL * self.allocated as f64
    }

    /// Returns true if fragmentation explains the failure. Four conditions must hold. The request fits into
    /// the sum of the free memory but not into its largest piece. The memory that the program is known to
    /// need fits the card. If the rest of the step is unknown, the free memory would hold as much again as
    /// this step has taken. And the holes are a significant part of the card, or the peak of an earlier step
    /// reached the allocated memory plus this request.
    fn is_fragmented(&self) -> bool {
        if self.needed.is_some_and(|needed| self.capacity > 0 && needed > self.capacity) {
            return false;
        }
        let free = self.cached() + self.room;
        let fits = free >= self.request && self.largest_hole < self.request;
        let before = self.steps.iter().map(|step| step.peak).max().unwrap_or(0);
        let rise = self.rise_to_come.filter(|_| self.steps.is_empty());
        let rest = self.of_optimizer.bytes + self.temporaries_to_come + rise.unwrap_or(0);
        let goes_on = self.capacity == 0 || self.needs_in_all() + rest <= self.capacity;
        let taken = self.allocated + self.request - self.step_began;
        let leaves_enough = !self.is_rest_open() || self.is_private() || free - self.request >= taken;
        // If the rest of the step is known to fit, closing the holes lets the program go on.
        let is_large =
            self.is_material(self.cached()) || rise.is_some() || before >= self.allocated + self.request;
        fits && goes_on && leaves_enough && is_large
    }

    /// Returns true if nothing tells how much memory the rest of this step takes: no earlier step has ended,
    /// or this step is larger than all of them, and neither repeated layers nor an optimizer's state give an
    /// estimate.
    pub(super) fn is_rest_open(&self) -> bool {
        // Without a graph, a layer keeps nothing, so it cannot predict the next layer.
        let is_estimated =
            self.is_in_update || self.rise_to_come.is_some() || self.to_come > 0 && self.has_autograd;
        self.is_larger_than_before() || self.steps.is_empty() && !is_estimated
    }

    /// Returns the growth from step to step if it is the cause: without it, the request would fit, and this
    /// step is no larger than earlier ones.
    pub(super) fn growth(&self) -> Option<Growth> {
        let mut growth = growth(&self.steps)?;
        if self.steps[1..].windows(2).all(|two| two[1].peak > two[0].peak) {
            // This step may be larger for another reason, so only the usual rise of two steps is added.
            let trend = self.steps[self.steps.len() - 1].peak - self.steps[1].peak;
            let now = self.allocated + self.request - self.steps[1].peak;
            growth.risen = now.min(trend + 2 * trend / growth.steps.max(1) as i64).max(0);
        }
        let height = |began: i64, peak: i64| peak - began;
        let usual = self.steps.iter().skip(1).map(|step| height(step.began, step.peak)).max()?;
        let now = height(self.step_began, self.allocated + self.request);
        let is_usual = now as f64 <= 1.25 * usual as f64 || growth.total > now;
        // After many steps that fitted, a step of the usual size failed. So the growth since then is the
        // cause, however small it is.
        let is_enough = self.is_material(growth.total) || growth.steps >= MANY_STEPS;
        let is_cause = growth.total.max(growth.risen) >= self.lacking();
        (is_usual && is_cause && is_enough).then_some(growth)
    }

    /// Returns the holder of the growing memory: the largest holder whose verdict is that it grows. Without
    /// one, returns the largest holder with at least half of the growth, such as a tensor to which results
    /// are joined.
    fn growing(&self) -> Option<(&Holder, Kept)> {
        let seen =
            self.holders.iter().filter(|holder| holder.verdict == "grows").max_by_key(|holder| holder.bytes);
        let half = self.growth().map_or(i64::MAX, |growth| growth.total / 2);
        let joined = || {
            let all =
                self.holders.iter().filter(|holder| !is_of_forward(holder) && holder.last_step >= Some(0));
            all.filter(|holder| holder.bytes >= half && holder.graphs == 0).max_by_key(|holder| holder.bytes)
        };
        let why = |holder: &Holder| {
            let is_copied = self.is_of_copies(holder) || self.has_state_of_each_step(holder);
            if is_copied { Kept::Copies } else { Kept::Grows }
        };
        seen.map(|holder| (holder, why(holder))).or_else(|| joined().map(|holder| (holder, Kept::Gathered)))
    }

    /// Returns true if parameters that were allocated in several steps take a significant share of the card.
    pub(super) fn are_copies_kept(&self) -> bool {
        self.copies.steps > 1 && self.is_material(self.copies.bytes)
    }

    /// Returns true if a holder has at least half of the copies of a model, and little else.
    fn is_of_copies(&self, holder: &Holder) -> bool {
        let is_most = 2 * holder.bytes >= self.copies.bytes && holder.bytes <= 2 * self.copies.bytes;
        self.are_copies_kept() && holder.graphs == 0 && holder.tensors >= FEWEST_GATHERED && is_most
    }

    /// Returns true if a holder has about as many bytes of each step as the model has parameters, in many
    /// tensors, such as a list of `state_dict` copies.
    fn has_state_of_each_step(&self, holder: &Holder) -> bool {
        let (bytes, tensors) = (holder.bytes / holder.steps.max(1), holder.tensors / holder.steps.max(1));
        // Copies count as parameters, too, and may have been made in each step.
        let of_model = self.parameters - self.copies.bytes;
        holder.graphs == 0 && tensors >= FEWEST_OF_STATE && (bytes - of_model).abs() <= of_model / 4
    }

    /// If this step took much more memory than each earlier step, returns the bytes that were allocated when
    /// it began, and the most that an earlier step took. Otherwise, or if fewer than [`FEWEST_STEPS`] steps
    /// have ended, returns `None`.
    pub(super) fn larger_step(&self) -> Option<(i64, i64)> {
        let usual = self.steps.iter().map(|step| step.peak - step.began).max()?;
        (self.steps.len() >= FEWEST_STEPS && self.is_larger_than_before()).then_some((self.step_began, usual))
    }

    /// Returns true if this step took much more than each earlier step.
    pub(super) fn is_larger_than_before(&self) -> bool {
        let now = self.allocated + self.request - self.step_began;
        let usual = self.steps.iter().map(|step| step.peak - step.began).max();
        usual.is_some_and(|usual| now as f64 > 1.25 * usual as f64)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::test_facts::{GIB, full, holder};
    use super::*;

    const MIB: i64 = 1 << 20;

    fn steps(ends: &[i64]) -> Vec<StepTotals> {
        let step = |ended: &i64| StepTotals {
            began: *ended,
            ended: *ended,
            peak: ended + 10 * GIB,
            peak_before_update: ended + 10 * GIB,
            parameters: 0,
        };
        ends.iter().map(step).collect()
    }

    #[test]
    fn oom_small_holes_of_a_full_card_are_no_fragmentation() {
        assert_eq!(full().judge().0, Cause::TooBig);
        // The same card, but a fifth of its memory is in holes, and an earlier step of this size has ended: the
        // cause is fragmentation. If no step has ended, more than the holes may be missing.
        let first = Facts { allocated: 18 * GIB, ..full() };
        assert_eq!(first.judge().0, Cause::TooBig);
        let holes = Facts { steps: steps(&[7 * GIB]), step_began: 7 * GIB, ..first };
        assert_eq!(holes.judge().0, Cause::Fragmentation);
        assert_eq!(Facts { needed: Some(34 * GIB), ..holes.clone() }.judge().0, Cause::TooBig);
        assert_eq!(Facts { largest_hole: 2 * GIB, ..holes.clone() }.judge().0, Cause::TooBig);
        // The step needs as much as the earlier one. If 14 GiB are allocated at its start, it does not fit,
        // even without holes. With 13 GiB it would fit, so the holes are the cause.
        let began = Facts { steps: steps(&[GIB]), step_began: 14 * GIB, ..holes.clone() };
        assert_eq!(began.judge().0, Cause::TooBig);
        assert_eq!(Facts { step_began: 13 * GIB, ..began }.judge().0, Cause::Fragmentation);
        // An earlier step held as much memory as this one. So even small holes are the cause.
        let small = Facts { steps: steps(&[13 * GIB]), step_began: 13 * GIB, ..full() };
        assert_eq!(small.judge().0, Cause::Fragmentation);
    }

    #[test]
    fn oom_blames_no_holes_if_the_rest_of_the_step_is_open() {
        // The first forward has taken 2 of 3 GiB, and holes have a sixth of the card: room for this request,
        // and no more than a fifth of what the forward has taken so far.
        let first = Facts {
            capacity: 3 * GIB,
            request: 352 * MIB,
            segment: 352 * MIB,
            allocated: 2 * GIB,
            reserved: 2560 * MIB,
            unknown: 250 * MIB,
            room: 262 * MIB,
            largest_hole: 224 * MIB,
            failed_calls: 1,
            ..Facts::default()
        };
        assert!(first.is_material(first.cached()) && first.is_rest_open());
        assert_eq!(first.judge().0, Cause::TooBig);
        // An earlier step took as much, so the rest is known to fit.
        let second = Facts { steps: steps(&[0]), step: 1, ..first.clone() };
        let as_much =
            |taken: i64| StepTotals { peak: taken, peak_before_update: taken, ..StepTotals::default() };
        assert_eq!(
            Facts { steps: vec![as_much(2500 * MIB)], ..second.clone() }.judge().0,
            Cause::Fragmentation
        );
        // This step takes far more than the earlier one did, as an evaluation that gathers its results does.
        let larger = Facts { steps: vec![as_much(GIB)], ..second };
        assert!(larger.is_rest_open());
        assert_eq!(larger.judge().0, Cause::TooBig);
        let results =
            holder(json!({ "name": "outputs", "tensors": 7, "first_step": 1, "last_step": 1, "bytes": GIB }));
        assert_eq!(Facts { holders: vec![results], ..larger }.judge().0, Cause::Kept);
        // A step as large as the earlier one gathers results: more of them than there are holes, or fewer.
        let usual = Facts { steps: vec![as_much(2500 * MIB)], step: 1, ..first.clone() };
        for (bytes, cause) in [(GIB, Cause::Kept), (400 * MIB, Cause::Fragmentation)] {
            let results = json!({ "tensors": 7, "first_step": 1, "last_step": 1, "bytes": bytes });
            assert_eq!(Facts { holders: vec![holder(results)], ..usual.clone() }.judge().0, cause);
        }
        // The previous forward and backward took no more after this request, or much more.
        let rises = |bytes: i64| Facts { rise_to_come: Some(bytes), ..first.clone() }.judge().0;
        assert_eq!((rises(0), rises(GIB)), (Cause::Fragmentation, Cause::TooBig));
        // In the optimizer's step, the state that is to come is known.
        assert_eq!(Facts { is_in_update: true, ..first.clone() }.judge().0, Cause::Fragmentation);
        // The holes would hold as much again as all that is allocated, or no request may use them.
        let much = Facts { allocated: GIB / 2, ..first.clone() };
        assert_eq!(much.judge().0, Cause::Fragmentation);
        assert_eq!(Facts { private: 500 * MIB, ..first.clone() }.judge().0, Cause::Fragmentation);
        // Repeated layers predict the rest of a forward that keeps a graph, and the optimizer's state follows.
        let layers = Facts { to_come: 100 * MIB, has_autograd: true, ..first };
        assert_eq!(layers.judge().0, Cause::Fragmentation);
        let adam = StateToCome { bytes: 500 * MIB, ..StateToCome::default() };
        assert_eq!(Facts { of_optimizer: adam, ..layers }.judge().0, Cause::TooBig);
    }

    #[test]
    fn oom_growth_is_the_cause_if_the_request_would_fit_without_it() {
        let ends: Vec<i64> = (0..8).map(|step| GIB + step * GIB).collect();
        let grows = Facts { steps: steps(&ends), step: 8, step_began: 13 * GIB, ..full() };
        assert_eq!(grows.judge().0, Cause::Grows);
        assert_eq!(grows.growth().map(|growth| (growth.per_step, growth.total)), Some((GIB, 6 * GIB)));
        // Not the cause: growth that is too small, a step that is larger than usual, step ends that rise and
        // fall, and two steps.
        let little: Vec<i64> = (0..8).map(|step| GIB + step * MIB).collect();
        assert_eq!(Facts { steps: steps(&little), ..grows.clone() }.growth(), None);
        assert_eq!(Facts { step_began: GIB, ..grows.clone() }.growth(), None);
        let ends: Vec<i64> = (0..8).map(|step| GIB * (1 + step % 2)).collect();
        assert_eq!(Facts { steps: steps(&ends), ..grows.clone() }.growth(), None);
        assert_eq!(Facts { steps: steps(&ends[..2]), ..grows.clone() }.growth(), None);
        // A buffer grows by 16 MiB a step, and so do the results that are computed from it. The retained
        // memory is smaller than the missing memory, but the step exceeds the second step by more than is missing.
        let mut all = steps(&(0..8).map(|step| GIB + step * 16 * MIB).collect::<Vec<_>>());
        for (step, each) in all.iter_mut().enumerate() {
            each.peak += step as i64 * 200 * MIB;
        }
        let buffer = Facts { steps: all, allocated: 12 * GIB, step_began: GIB + 128 * MIB, ..grows };
        assert_eq!(buffer.growth().map(|growth| growth.total), Some(96 * MIB));
        assert_eq!(buffer.judge().0, Cause::Grows);
        let mut flat = buffer.clone();
        flat.steps[4].peak = flat.steps[3].peak;
        assert_eq!(flat.growth(), None);
    }

    #[test]
    fn oom_blames_a_failed_attempt_whose_graph_is_still_live() {
        let retry = Facts { of_failed_attempt: 4 * GIB, ..full() };
        assert_eq!(retry.judge(), (Cause::Kept, None));
        // A small part of the live memory; less than the request lacks.
        assert_eq!(Facts { of_failed_attempt: GIB, ..retry.clone() }.judge().0, Cause::TooBig);
        let lacks = Facts { request: 6 * GIB, segment: 6 * GIB, ..retry };
        assert_eq!(lacks.judge().0, Cause::TooBig);
    }

    #[test]
    fn oom_counts_the_gradients_of_a_first_update() {
        // The forward of a large model runs out of memory at its beginning: 12 GiB of parameters need as many
        // gradients in the optimizer's step, and twice as much state.
        let of_optimizer = StateToCome { bytes: 24 * GIB, gradients: 12 * GIB, ..StateToCome::default() };
        let first = Facts {
            allocated: 12 * GIB,
            parameters: 12 * GIB,
            capacity: 13 * GIB,
            reserved: 13 * GIB,
            unknown: GIB / 2,
            request: GIB,
            segment: GIB,
            of_optimizer,
            ..Facts::default()
        };
        assert_eq!(first.short_of_whole_step(), 48 * GIB + GIB / 2 - 13 * GIB);
        // Averaged weights and the optimizer's temporary results are live in its step, too.
        let temporaries = StateToCome { temporaries: 12 * GIB, ..first.of_optimizer.clone() };
        let average = Facts { other_lasting: 12 * GIB, of_optimizer: temporaries, ..first.clone() };
        assert_eq!(average.needs_by_update() - first.needs_by_update(), 24 * GIB);
        // With more activations than gradients, the next step's forward needs most.
        let much = Facts { allocated: 30 * GIB, ..first };
        assert_eq!(much.short_of_whole_step(), 55 * GIB + GIB / 2 - 13 * GIB);
    }

    #[test]
    fn oom_names_the_holder_of_copies_of_the_model() {
        let copies = Copies { bytes: 5 * GIB, steps: 4 };
        let bank = holder(json!({ "tensors": 96, "bytes": 5 * GIB, "last_step": 3 }));
        let facts = Facts { step: 4, copies, holders: vec![bank], ..full() };
        let why = |facts: &Facts| facts.judge().1.map(|(holder, why)| (holder.bytes, why));
        assert_eq!((facts.judge().0, why(&facts)), (Cause::Grows, Some((5 * GIB, Kept::Copies))));
        // The search has seen the holder grow, so its numbers are no results that .item() would make smaller.
        let grows = holder(json!({ "tensors": 96, "bytes": 5 * GIB, "last_step": 3, "verdict": "grows" }));
        let grown = Facts { holders: vec![grows], ..facts.clone() };
        assert_eq!((grown.judge().0, why(&grown)), (Cause::Grows, Some((5 * GIB, Kept::Copies))));
        // No holder of the copies: a small part of them, and far more than they take.
        for bytes in [GIB, 12 * GIB] {
            let other = holder(json!({ "tensors": 96, "bytes": bytes, "last_step": 3 }));
            let found = Facts { holders: vec![other], ..facts.clone() };
            assert_eq!((found.judge().0, why(&found)), (Cause::Grows, None));
        }
    }

    #[test]
    fn oom_distinguishes_other_processes_a_limit_and_one_large_request() {
        let others = Facts { others: 4 * GIB, reserved: 19 * GIB, allocated: 19 * GIB, ..full() };
        assert_eq!(others.judge().0, Cause::OtherProcess);
        assert_eq!(Facts { others: GIB, ..others }.judge().0, Cause::TooBig);
        let outside = Facts { outside: 4 * GIB, reserved: 19 * GIB, allocated: 19 * GIB, ..full() };
        assert_eq!(outside.judge().0, Cause::OutsideTorch);
        // Device and host share one memory. The host is the cause if its memory is at least half as large as
        // torch's blocks, and otherwise it is not.
        let host = Facts { host: Some(10 * GIB), reserved: 13 * GIB, allocated: 13 * GIB, ..full() };
        assert_eq!(host.judge().0, Cause::HostMemory);
        let host = Facts { host: Some(4 * GIB), reserved: 19 * GIB, allocated: 19 * GIB, ..full() };
        assert_eq!(host.judge().0, Cause::TooBig);
        // A context of 4 GiB is the cause, because it is far larger than usual; one of half a GiB is not.
        let context = Facts { unknown: 4 * GIB, reserved: 19 * GIB, allocated: 19 * GIB, ..full() };
        assert_eq!(context.judge().0, Cause::OutsideTorch);
        let usual = Facts { capacity: 4 * GIB, unknown: GIB / 2, request: GIB, room: 0, ..Facts::default() };
        assert_eq!(
            Facts { segment: GIB, allocated: 3 * GIB, reserved: 3 * GIB, failed_calls: 1, ..usual }.judge().0,
            Cause::TooBig
        );
        assert_eq!(Facts { failed_calls: 0, room: 2 * GIB, ..full() }.judge().0, Cause::Limit);
        assert_eq!(Facts { request: 25 * GIB, ..full() }.judge().0, Cause::RequestTooLarge);
        assert_eq!(Facts { is_injected: true, request: 25 * GIB, ..full() }.judge().0, Cause::Injected);
        // The capacity of the card is unknown.
        assert_eq!(Facts { capacity: 0, ..full() }.judge().0, Cause::TooBig);
    }
}
