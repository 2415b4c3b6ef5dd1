//! Enough memory that is free, but in pieces that are too small.

use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::{Blame, Cause, OomCase, UNSURE};
use super::{injected, limit, too_big};

/// The size in bytes of the pages by which expandable segments of large blocks grow and shrink.
const PAGE: i64 = 20 << 20;
/// The setting that lets the allocator return parts of its segments to the device.
const EXPANDABLE: &str = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";

pub(super) static CAUSE: Cause = Cause {
    verdict: "fragmentation",
    find: |evidence| is_fragmented(evidence).then(|| Blame::of(&CAUSE)),
    because,
    tries,
    ..Cause::DEFAULT
};

/// Returns true if fragmentation explains the failure. Four conditions must hold. The request fits into
/// the sum of the free memory but not into its largest piece. The memory that the program is known to
/// need fits the card. If the rest of the step is unknown, the free memory would hold as much again as
/// this step has taken. And the holes are a significant part of the card, or the peak of an earlier step
/// reached the allocated memory plus this request.
pub(super) fn is_fragmented(evidence: &Evidence) -> bool {
    let Evidence { request, device, torch, steps, to_come, .. } = evidence;
    if device.capacity > 0 && device.needed_too_much().is_some() {
        return false;
    }
    let free = torch.cached() + device.room;
    let fits = free >= request.bytes && torch.largest_hole() < request.bytes;
    let before = steps.finished.iter().map(|step| step.peak).max().unwrap_or(0);
    let rise = to_come.rise.filter(|_| steps.finished.is_empty());
    let rest = to_come.of_optimizer.bytes + to_come.temporaries + rise.unwrap_or(0);
    let goes_on = device.capacity == 0 || evidence.needs_in_all() + rest <= device.capacity;
    let leaves_enough =
        !evidence.is_rest_open() || torch.is_private() || free - request.bytes >= evidence.taken_by_step();
    // If the rest of the step is known to fit, closing the holes lets the program go on.
    let is_large =
        evidence.is_material(torch.cached()) || rise.is_some() || before >= evidence.with_request();
    fits && goes_on && leaves_enough && is_large
}

fn because(case: &OomCase<'_>, units: Unit) -> String {
    let torch = &case.evidence.torch;
    if torch.is_private() {
        return format!(
            "{} is free in private pools (CUDA graphs, torch.cuda.MemPool), where a request of another pool may not use it",
            units.show(torch.private)
        );
    }
    format!(
        "{} is free in torch's cache and {} on the device, but the largest piece has {}, and {} is needed",
        units.show(torch.cached()),
        case.room_text(units),
        units.show(torch.largest_hole()),
        units.show(case.evidence.request.bytes)
    )
}

/// Returns the remedies that close holes or prevent them.
fn tries(case: &OomCase<'_>) -> Vec<&'static str> {
    if case.evidence.torch.is_private() {
        vec![
            "let graphs share one pool: torch.cuda.graph(g, pool=first.pool()); del a graph or a pool that is no longer used",
        ]
    } else if has_expandable(case) {
        vec![
            "free the blocks that pin segments: memtrace frag names them",
            "pad inputs to a few lengths, so that sizes repeat",
        ]
    } else if can_expand(&case.evidence) {
        vec![EXPANDABLE, "free the blocks that pin segments: memtrace frag names them"]
    } else {
        vec![
            "free the blocks that pin segments (memtrace frag names them), or allocate them first, as one tensor",
            "expandable_segments:True may not help, because nearly every 20 MiB holds a live block: memtrace tune replays it",
        ]
    }
}

/// Returns true if expandable segments are on.
fn has_expandable(case: &OomCase<'_>) -> bool {
    case.oom_state.trace.meta.allocator.option("expandable_segments") == Some("True")
}

/// Returns true if expandable segments would make room for the request. They can return each whole page of
/// a hole to the device, but not a page with a live block.
fn can_expand(evidence: &Evidence) -> bool {
    let pages: i64 = evidence.torch.holes.iter().map(|hole| hole / PAGE * PAGE).sum();
    pages + evidence.device.room >= evidence.request.bytes
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let Evidence { request, device, torch, .. } = &case.evidence;
    let cached = torch.cached() - torch.private;
    let is_moot = [&CAUSE, &injected::CAUSE, &limit::CAUSE].iter().any(|cause| case.is_caused_by(cause));
    if is_moot || !case.evidence.is_part(cached, 50) {
        return None;
    }
    let would = match cached + device.room >= request.bytes {
        true if case.is_caused_by(&too_big::CAUSE) && case.evidence.is_rest_open() => {
            "make room for this request, and what the step needs after it is unknown"
        }
        true => "make room for this request, but the cause would remain",
        false => "not be enough",
    };
    Some(format!(
        "{} is free in torch's cache, in pieces of at most {}: closing these holes would {would}",
        units.show(cached),
        units.show(torch.largest_hole())
    ))
}

pub(super) fn remark_on_private_pools(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let private = case.evidence.torch.private;
    (!case.is_caused_by(&CAUSE) && case.evidence.is_part(private, 20)).then(|| {
        format!(
            "{} is free in private pools (CUDA graphs, torch.cuda.MemPool), where this request may not use it",
            units.show(private)
        )
    })
}

pub(super) fn remedy_if(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    let evidence = &case.evidence;
    let are_holes_large = evidence.is_rest_open() && evidence.is_material(evidence.torch.cached());
    let applies = case.is_caused_by(&too_big::CAUSE) && are_holes_large;
    (applies && !has_expandable(case) && can_expand(evidence))
        .then(|| format!("{EXPANDABLE} makes room for this request{UNSURE}"))
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Meta;
    use memtrace_trace::meta::Allocator;
    use serde_json::json;

    use super::super::super::evidence::{StateToCome, StepTotals};
    use super::super::super::test_evidence::{GIB, MIB, full, holder, steps};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;

    #[test]
    fn oom_small_holes_of_a_full_card_are_no_fragmentation() {
        assert_eq!(full().verdict(), "too big");
        // The same card, but a fifth of its memory is in holes, and an earlier step of this size has ended: the
        // cause is fragmentation. If no step has ended, more than the holes may be missing.
        let first = full().with(|e| e.torch.allocated = 18 * GIB);
        assert_eq!(first.verdict(), "too big");
        let holes = first.with(|e| {
            e.steps.finished = steps(&[7 * GIB]);
            e.steps.began = 7 * GIB;
        });
        assert_eq!(holes.verdict(), "fragmentation");
        assert_eq!(holes.with(|e| e.device.needed = Some(34 * GIB)).verdict(), "too big");
        assert_eq!(holes.with(|e| e.torch.holes = vec![2 * GIB]).verdict(), "too big");
        // The step needs as much as the earlier one. If 14 GiB are allocated at its start, it does not fit,
        // even without holes. With 13 GiB it would fit, so the holes are the cause.
        let began = holes.with(|e| {
            e.steps.finished = steps(&[GIB]);
            e.steps.began = 14 * GIB;
        });
        assert_eq!(began.verdict(), "too big");
        assert_eq!(began.with(|e| e.steps.began = 13 * GIB).verdict(), "fragmentation");
        // An earlier step held as much memory as this one. So even small holes are the cause.
        let small = full().with(|e| {
            e.steps.finished = steps(&[13 * GIB]);
            e.steps.began = 13 * GIB;
        });
        assert_eq!(small.verdict(), "fragmentation");
    }

    #[test]
    fn oom_blames_no_holes_if_the_rest_of_the_step_is_open() {
        // The first forward has taken 2 of 3 GiB, and holes have a sixth of the card: room for this request,
        // and no more than a fifth of what the forward has taken so far.
        let first = Evidence::default().with(|e| {
            e.device.capacity = 3 * GIB;
            e.request.bytes = 352 * MIB;
            e.request.segment = 352 * MIB;
            e.torch.allocated = 2 * GIB;
            e.torch.reserved = 2560 * MIB;
            e.device.unknown = 250 * MIB;
            e.device.room = 262 * MIB;
            e.torch.holes = vec![224 * MIB];
            e.request.failed_calls = 1;
        });
        assert!(first.is_material(first.torch.cached()) && first.is_rest_open());
        assert_eq!(first.verdict(), "too big");
        // An earlier step took as much, so the rest is known to fit.
        let second = first.with(|e| {
            e.steps.finished = steps(&[0]);
            e.request.step = 1;
        });
        let as_much =
            |taken: i64| StepTotals { peak: taken, peak_before_update: taken, ..StepTotals::default() };
        assert_eq!(second.with(|e| e.steps.finished = vec![as_much(2500 * MIB)]).verdict(), "fragmentation");
        // This step takes far more than the earlier one did, as an evaluation that gathers its results does.
        let larger = second.with(|e| e.steps.finished = vec![as_much(GIB)]);
        assert!(larger.is_rest_open());
        assert_eq!(larger.verdict(), "too big");
        let results =
            holder(json!({ "name": "outputs", "tensors": 7, "first_step": 1, "last_step": 1, "bytes": GIB }));
        assert_eq!(larger.with(|e| e.holders = vec![results]).verdict(), "memory is kept");
        // A step as large as the earlier one gathers results: more of them than there are holes, or fewer.
        let usual = first.with(|e| {
            e.steps.finished = vec![as_much(2500 * MIB)];
            e.request.step = 1;
        });
        for (bytes, cause) in [(GIB, "memory is kept"), (400 * MIB, "fragmentation")] {
            let results = json!({ "tensors": 7, "first_step": 1, "last_step": 1, "bytes": bytes });
            assert_eq!(usual.with(|e| e.holders = vec![holder(results)]).verdict(), cause);
        }
        // The previous forward and backward took no more after this request, or much more.
        let rises = |bytes: i64| first.with(|e| e.to_come.rise = Some(bytes)).verdict();
        assert_eq!((rises(0), rises(GIB)), ("fragmentation", "too big"));
        // In the optimizer's step, the state that is to come is known.
        assert_eq!(first.with(|e| e.request.is_in_update = true).verdict(), "fragmentation");
        // The holes would hold as much again as all that is allocated, or no request may use them.
        let much = first.with(|e| e.torch.allocated = GIB / 2);
        assert_eq!(much.verdict(), "fragmentation");
        assert_eq!(first.with(|e| e.torch.private = 500 * MIB).verdict(), "fragmentation");
        // Repeated layers predict the rest of a forward that keeps a graph, and the optimizer's state follows.
        let layers = first.with(|e| {
            e.to_come.bytes = 100 * MIB;
            e.forwards.has_autograd = true;
        });
        assert_eq!(layers.verdict(), "fragmentation");
        let adam = StateToCome { bytes: 500 * MIB, ..StateToCome::default() };
        assert_eq!(layers.with(|e| e.to_come.of_optimizer = adam).verdict(), "too big");
    }

    /// A step fails after `steps` of the same size. 3 GiB of the cache are free, in the pool of this number.
    fn trace(steps: i64, pool: i64, conf: &str) -> OomTrace {
        let allocator = Allocator { conf: conf.to_owned(), ..Allocator::default() };
        let mut trace = OomTrace::without_sample(24 * GIB, Meta { allocator, ..Meta::default() });
        trace.sample(512 * MIB, "others=0");
        for step in 0..steps {
            let id = trace.block(20 * GIB, owner("Net", "forward", step));
            trace.free(id, 20 * GIB, owner("Net", "forward", step));
        }
        trace.hole(3 * GIB, pool);
        trace.fill(512 * MIB, owner("Net", "forward", steps));
        trace.fails(3 * GIB + 256 * MIB, owner("Net", "forward", steps));
        trace
    }

    #[test]
    fn oom_says_that_the_free_memory_is_in_pieces() {
        let cause = "verdict: fragmentation: 2.75 GiB missing for this request. 3.00 GiB is free in torch's cache and 512.00 MiB on the \
                     device, but the largest piece has 3.00 GiB, and 3.25 GiB is needed.";
        trace(1, 0, "").prints(&[
            cause,
            "try: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "try: free the blocks that pin segments: memtrace frag names them",
        ]);
        trace(1, 0, "expandable_segments:True").prints(&[
            cause,
            "try: free the blocks that pin segments: memtrace frag names them",
            "try: pad inputs to a few lengths, so that sizes repeat",
        ]);
        trace(1, 7, "").prints(&[
            "verdict: fragmentation: 2.75 GiB missing for this request. 3.00 GiB is free in private pools (CUDA graphs, \
             torch.cuda.MemPool), where a request of another pool may not use it.",
            "try: let graphs share one pool: torch.cuda.graph(g, pool=first.pool()); del a graph or a pool that is no longer used",
        ]);
    }

    #[test]
    fn oom_remarks_on_pieces_that_are_not_the_cause() {
        let remark = "also: 3.00 GiB is free in torch's cache, in pieces of at most 3.00 GiB: closing these holes would make room for this \
                      request, and what the step needs after it is unknown";
        let remedy = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes room for this request, may not be enough alone";
        trace(0, 0, "").prints(&[remark, &format!("try: {remedy}")]);
        trace(0, 0, "expandable_segments:True").never_prints(remedy);
        let private = |bytes: i64| {
            let mut trace = OomTrace::new(24 * GIB);
            trace.hole(bytes, 7);
            trace.fill(512 * MIB, owner("Net", "forward", 0));
            trace.fails(5 * GIB, owner("Net", "forward", 0));
            trace
        };
        private(2 * GIB).prints(&[
            "also: 2.00 GiB is free in private pools (CUDA graphs, torch.cuda.MemPool), where this request may not use it",
        ]);
        private(GIB).never_prints("also: 1.00 GiB is free in private pools");
    }
}
