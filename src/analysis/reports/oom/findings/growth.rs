//! Memory that each step leaves allocated.

use memtrace_trace::units::Unit;
use memtrace_trace::{Category, Verdict};

use super::super::evidence::{Evidence, StepTotals};
use super::super::finding::{Blame, Cause, GROWS, Help, OomCase};
use super::super::kept_reasons::{Kept, words};
use super::super::limits::{FEWEST_STEPS, LARGER_STEP};
use super::super::retained_holders::is_of_forward;
use super::copies;
use crate::render::numbers::{counted, upper_first};
use crate::state::block::Owner;
use crate::state::model_facts::is_module;
use crate::state::retained::Holder;

/// Growth over at least this many steps can be the cause even if it is small, because it is not a
/// coincidence.
const MANY_STEPS: usize = 6;

pub(super) static CAUSE: Cause = Cause {
    verdict: GROWS,
    find: |evidence| {
        let growth = evidence.growth();
        if growth.is_none() && !has_growing_holder(evidence) {
            return None;
        }
        let kept = growing(evidence, growth);
        // Without growth from step to step, the copies themselves are the proof.
        let are_copies = matches!(kept, Some((_, Kept::Copies))) && copies::are_kept(evidence);
        let cause = if growth.is_none() && are_copies { &copies::CAUSE } else { &CAUSE };
        Some(Blame { cause, kept: kept.map(|(holder, why)| (holder.clone(), why)) })
    },
    because,
    tries,
    help: Help::FreeKept,
    ..Cause::DEFAULT
};

/// The memory that each step leaves allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct GrowthFinding {
    /// The mean of the bytes per step.
    pub(in super::super) per_step: i64,
    /// The growth in bytes from the end of the second finished step to the end of the last one.
    total: i64,
    /// The number of steps over which `total` was measured.
    steps: usize,
    /// The bytes by which this step is higher than the peak of the second finished step, if each step had a
    /// higher peak than the step before; otherwise 0. If a buffer grows, so do the results computed from it.
    risen: i64,
}

/// Returns the growth of the memory left at the ends of steps, without the first step. Returns `None` if too
/// few steps add to it, or if later steps free much of it again.
fn of_steps(steps: &[StepTotals]) -> Option<GrowthFinding> {
    let steps = steps.get(1..)?;
    if steps.len() < FEWEST_STEPS {
        return None;
    }
    let more: Vec<i64> = steps.windows(2).map(|two| two[1].ended - two[0].ended).collect();
    let grown = more.iter().filter(|bytes| **bytes > 0).count();
    let total = steps.last()?.ended - steps.first()?.ended;
    let per_step = total / i64::try_from(more.len()).ok()?;
    // A leak may occur only in every third step, so at least a third of the steps must grow. Memory for a
    // longer input is freed again, so the total must be more than twice what the steps freed.
    let falls: i64 = more.iter().filter(|bytes| **bytes < 0).sum();
    (total > 0 && 3 * grown >= more.len() && -2 * falls < total).then_some(GrowthFinding {
        per_step,
        total,
        steps: more.len(),
        risen: 0,
    })
}

impl Evidence {
    /// Returns the growth from step to step if it is the cause: without it, the request would fit, and this
    /// step is no larger than earlier ones.
    pub(in super::super) fn growth(&self) -> Option<GrowthFinding> {
        let steps = &self.steps.finished;
        let mut growth = of_steps(steps)?;
        if steps[1..].windows(2).all(|two| two[1].peak > two[0].peak) {
            // This step may be larger for another reason, so only the usual rise of two steps is added.
            let trend = steps[steps.len() - 1].peak - steps[1].peak;
            let now = self.with_request() - steps[1].peak;
            growth.risen = now.min(trend + 2 * trend / growth.steps.max(1) as i64).max(0);
        }
        let usual = steps.iter().skip(1).map(|step| step.peak - step.began).max()?;
        let now = self.taken_by_step();
        let is_usual = now as f64 <= LARGER_STEP * usual as f64 || growth.total > now;
        // After many steps that fitted, a step of the usual size failed. So the growth since then is the
        // cause, however small it is.
        let is_enough = self.is_material(growth.total) || growth.steps >= MANY_STEPS;
        let is_cause = growth.total.max(growth.risen) >= self.lacking();
        (is_usual && is_cause && is_enough).then_some(growth)
    }
}

/// Returns true if a holder that grows keeps most memory.
pub(super) fn has_growing_holder(evidence: &Evidence) -> bool {
    matches!(evidence.kept(), Some((_, Kept::Grows)))
}

/// Returns the holder of the growing memory: the largest holder whose verdict is that it grows, if it has at
/// least a quarter of the measured growth. Otherwise, returns the largest holder with at least half of the
/// growth, such as a tensor to which results are joined.
fn growing(evidence: &Evidence, growth: Option<GrowthFinding>) -> Option<(&Holder, Kept)> {
    let holders = || evidence.holders.iter();
    let quarter = growth.map_or(0, |growth| growth.total / 4);
    let is_seen = |holder: &&Holder| holder.verdict == Some(Verdict::Grows) && holder.bytes >= quarter;
    let seen = holders().filter(is_seen).max_by_key(|holder| holder.bytes);
    let half = growth.map_or(i64::MAX, |growth| growth.total / 2);
    let joined = || {
        let all = holders().filter(|holder| !is_of_forward(holder) && holder.last_step >= Some(0));
        all.filter(|holder| holder.bytes >= half && holder.graphs == 0).max_by_key(|holder| holder.bytes)
    };
    let why = |holder: &Holder| {
        let is_copied =
            copies::is_of_copies(evidence, holder) || copies::has_state_of_each_step(evidence, holder);
        if is_copied { Kept::Copies } else { Kept::Grows }
    };
    seen.map(|holder| (holder, why(holder))).or_else(|| joined().map(|holder| (holder, Kept::Gathered)))
}

/// Returns the largest buffer of a module, if it was made after the first step and is at least as large as
/// all that the steps left behind.
fn grown_buffer<'a>(case: &'a OomCase<'_>) -> Option<&'a (Owner, i64)> {
    let growth = case.evidence.growth()?;
    let is_it = |(owner, bytes): &&(Owner, i64)| {
        owner.category == Category::Buffer && owner.step > 0 && *bytes >= growth.total
    };
    case.live.iter().filter(is_it).max_by_key(|(_, bytes)| *bytes)
}

fn because(case: &OomCase<'_>, units: Unit) -> String {
    let growth = case.evidence.growth();
    let kept = case.blame.kept.as_ref();
    let grown = growth.map(|growth| {
        let risen = if growth.total < case.evidence.lacking() {
            format!(", and needs more to work with it: {} more than step 1", units.show(growth.risen))
        } else {
            String::new()
        };
        format!(
            "each step leaves {} behind, {} over the last {}{risen}; without it {} would fit",
            units.show(growth.per_step),
            units.show(growth.total),
            counted(growth.steps as u64, "step"),
            units.show(case.evidence.request.bytes)
        )
    });
    let held = kept.map(|(holder, _)| match growth {
        // The holder grows more slowly than all memory together, so its line says that its rate
        // is only a part of the growth.
        Some(growth) if holder.bytes_per_step() < Some(growth.per_step) => {
            holder.line_with(units, "of it a step")
        }
        Some(_) => upper_first(&holder.kept(units)),
        None => holder.line(units),
    });
    let state = case.evidence.live.states.filter(|_| kept.is_none()).map(|states| {
        format!(
            "Optimizer state of {} was allocated in {}: old optimizers are kept",
            units.show(states.bytes),
            counted(states.steps as u64, "step")
        )
    });
    let buffer = grown_buffer(case).filter(|_| kept.is_none()).map(|(owner, bytes)| {
        let module = case.oom_state.symbols().or_dash(owner.module);
        let of = if is_module(&module) { format!(" of {module}") } else { String::new() };
        format!("A buffer{of} has {} now, and was made anew in step {}", units.show(*bytes), owner.step)
    });
    [grown, held, state, buffer].into_iter().flatten().collect::<Vec<_>>().join(". ")
}

fn tries(case: &OomCase<'_>) -> Vec<&'static str> {
    let mut all = Vec::new();
    if let Some((holder, why)) = &case.blame.kept {
        if holder.graphs > 0 && !case.evidence.forwards.has_backward && *why == Kept::Grows {
            all.push(
                "torch.no_grad() or torch.inference_mode() around this loop: it keeps graphs for a backward, but no backward has run",
            );
        }
        all.extend(words(*why).tries);
        return all;
    }
    if case.evidence.live.states.is_some() {
        all.push(
            "create the optimizer once, or del the old one with all that refers to it (a list, a scheduler, a closure) before \
             the next",
        );
    }
    if grown_buffer(case).is_some() {
        all.push(
            "a fixed size for the buffer, whose oldest rows each step overwrites (or self.bank[-4096:] after torch.cat): \
             joining new rows to all old ones copies them in each step, and both copies are live meanwhile",
        );
    }
    all.push(
        "memtrace leaks shows the ops and lines whose memory grows; memtrace leaks --holders \
         shows the objects that keep it",
    );
    all
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let growth = of_steps(&case.evidence.steps.finished)
        .filter(|growth| !case.is_caused_by(&CAUSE) && case.evidence.is_part(growth.total, 50))?;
    Some(format!(
        "memory also grew by {} per step, {} in all; run memtrace leaks to see what grew",
        units.show(growth.per_step),
        units.show(growth.total)
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::test_evidence::{GIB, MIB, full, holder, steps};
    use super::super::super::test_trace::{OomTrace, owner};

    #[test]
    fn oom_growth_is_the_cause_if_the_request_would_fit_without_it() {
        let ends: Vec<i64> = (0..8).map(|step| GIB + step * GIB).collect();
        let grows = full().with(|e| {
            e.steps.finished = steps(&ends);
            e.request.step = 8;
            e.steps.began = 13 * GIB;
        });
        assert_eq!(grows.verdict(), "memory grows");
        assert_eq!(grows.growth().map(|growth| (growth.per_step, growth.total)), Some((GIB, 6 * GIB)));
        // A list that grows is the holder only if it has a notable share of the growth.
        let blamed = |bytes: i64| {
            let list = holder(json!({ "verdict": "grows", "bytes": bytes, "last_step": 7 }));
            grows.with(|e| e.holders = vec![list]).judge().kept.map(|(holder, _)| holder.bytes)
        };
        assert_eq!((blamed(2 * GIB), blamed(MIB)), (Some(2 * GIB), None));
        // Not the cause: growth that is too small, a step that is larger than usual, step ends that rise and
        // fall, and two steps.
        let little: Vec<i64> = (0..8).map(|step| GIB + step * MIB).collect();
        assert_eq!(grows.with(|e| e.steps.finished = steps(&little)).growth(), None);
        assert_eq!(grows.with(|e| e.steps.began = GIB).growth(), None);
        let ends: Vec<i64> = (0..8).map(|step| GIB * (1 + step % 2)).collect();
        assert_eq!(grows.with(|e| e.steps.finished = steps(&ends)).growth(), None);
        assert_eq!(grows.with(|e| e.steps.finished = steps(&ends[..2])).growth(), None);
        // A buffer grows by 16 MiB a step, and so do the results that are computed from it. The retained
        // memory is smaller than the missing memory, but the step exceeds the second step by more than is missing.
        let mut all = steps(&(0..8).map(|step| GIB + step * 16 * MIB).collect::<Vec<_>>());
        for (step, each) in all.iter_mut().enumerate() {
            each.peak += step as i64 * 200 * MIB;
        }
        let buffer = grows.with(|e| {
            e.steps.finished = all;
            e.torch.allocated = 12 * GIB;
            e.steps.began = GIB + 128 * MIB;
        });
        assert_eq!(buffer.growth().map(|growth| growth.total), Some(96 * MIB));
        assert_eq!(buffer.verdict(), "memory grows");
        let mut flat = buffer.clone();
        flat.steps.finished[4].peak = flat.steps.finished[3].peak;
        assert_eq!(flat.growth(), None);
    }

    /// Five steps that each leave `bytes`, and then one that fails at a request for `request`.
    fn trace(bytes: i64, request: i64) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        for step in 0..5 {
            trace.block(bytes, owner("Net", "forward", step));
            let id = trace.block(4 * GIB, owner("Net", "forward", step));
            trace.free(id, 4 * GIB, owner("Net", "forward", step));
        }
        trace.fill(512 * MIB, owner("Net", "forward", 5));
        trace.fails(request, owner("Net", "forward", 5));
        trace
    }

    #[test]
    fn oom_says_that_each_step_leaves_memory_behind() {
        let grown = "verdict: memory grows: 512.00 MiB missing for this request. Each step leaves 3.00 GiB behind, 9.00 GiB over the last 3 \
                     steps; without it 1.00 GiB would fit.";
        trace(3 * GIB, GIB).prints(&[
            grown,
            "try: memtrace leaks shows the ops and lines whose memory grows; memtrace leaks --holders shows the objects that keep it",
        ]);
        let mut found = trace(3 * GIB, GIB);
        found.found(&[json!({ "verdict": "grows", "graphs": 5, "tensors": 0, "bytes": 12 * GIB, "last_step": 4, "steps": 5 })]);
        found.prints(&[
            &format!("{grown} 2.40 GiB of it a step: variable `x` (train.py:7) keeps 5 autograd graphs, 12.00 GiB of steps 0-4."),
            "try: torch.no_grad() or torch.inference_mode() around this loop: it keeps graphs for a backward, but no backward has run",
            "try: keep numbers, not tensors: .item(), or .detach().cpu(); drop old entries",
        ]);
        // The growth is too small to be the cause, or to be named.
        trace(200 * MIB, 3 * GIB).prints(&[
            "also: memory also grew by 200.00 MiB per step, 600.00 MiB in all; run memtrace leaks to see what grew",
        ]);
        trace(100 * MIB, 3 * GIB).never_prints("memory also grew");
    }
}
