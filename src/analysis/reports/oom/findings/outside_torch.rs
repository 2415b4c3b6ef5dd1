//! This process's memory outside torch's allocator, without which the request would fit.

use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::{Blame, Cause, Help, OomCase};

pub(super) static CAUSE: Cause = Cause {
    verdict: "outside torch",
    find: |evidence| {
        let beside = evidence.device.outside + evidence.device.large_context();
        evidence.is_enough(beside).then(|| Blame::of(&CAUSE))
    },
    because: |case, units| {
        let device = &case.evidence.device;
        let request = units.show(case.evidence.request.bytes);
        let held = format!("this process holds {} outside torch's allocator", units.show(device.outside));
        let context = format!(
            "the CUDA context and untraced memory take {} instead of the usual 0.3 to 0.6 GiB",
            units.show(device.unknown)
        );
        match parts(&case.evidence) {
            (true, false) => format!("{held}; without it, {request} would fit"),
            (false, _) => format!("{context}; at the usual size, {request} would fit"),
            (true, true) => {
                format!(
                    "{held}, and {context}; without the former and with the latter at its usual size, {request} would fit"
                )
            }
        }
    },
    tries: |case| {
        let (is_outside, is_context) = parts(&case.evidence);
        let outside = is_outside.then_some(
            "look for libraries beside torch (NCCL, a second framework, plain cudaMalloc): memtrace peak --of used",
        );
        let context = is_context.then_some(
            "a smaller context: CUDA_MODULE_LOADING=LAZY, fewer extensions of torch, no second framework; memtrace ledger shows its size",
        );
        outside.into_iter().chain(context).collect()
    },
    help: Help::LowerPeak,
    ..Cause::DEFAULT
};

/// Returns whether the memory of traced calls must be named as the cause, and whether the large context must be. If
/// neither is enough alone, both must.
fn parts(evidence: &Evidence) -> (bool, bool) {
    let (outside, context) = (evidence.device.outside, evidence.device.large_context());
    if outside.max(context) < evidence.lacking() {
        (true, true)
    } else {
        (outside >= context, outside < context)
    }
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let device = &case.evidence.device;
    (!case.is_caused_by(&CAUSE) && case.evidence.is_part(device.outside, 20))
        .then(|| format!("this process holds {} outside torch's allocator", units.show(device.outside)))
}

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A card of 24 GiB on which a request lacks `lacking` bytes.
    fn trace(outside: i64, context: i64, lacking: i64) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.sample(context, "others=0");
        trace.outside(outside);
        trace.fill(512 * MIB, owner("Net", "forward", 0));
        trace.fails(lacking + 512 * MIB, owner("Net", "forward", 0));
        trace
    }

    #[test]
    fn oom_says_that_the_request_would_fit_without_memory_outside_torch() {
        let libraries = "try: look for libraries beside torch (NCCL, a second framework, plain cudaMalloc): memtrace peak --of used";
        let extensions = "try: a smaller context: CUDA_MODULE_LOADING=LAZY, fewer extensions of torch, no second framework; memtrace \
                          ledger shows its size";
        let outside = || trace(4 * GIB, 512 * MIB, 512 * MIB);
        outside().prints(&[
            "verdict: outside torch: 512.00 MiB missing for this request. This process holds 4.00 GiB outside torch's allocator; \
             without it, 1.00 GiB would fit.",
            libraries,
        ]);
        outside().never_prints("a smaller context");
        let context = || trace(0, 4 * GIB, 512 * MIB);
        context().prints(&[
            "verdict: outside torch: 512.00 MiB missing for this request. The CUDA context and untraced memory take 4.00 GiB instead of \
             the usual 0.3 to 0.6 GiB; at the usual size, 1.00 GiB would fit.",
            extensions,
        ]);
        context().never_prints("look for libraries");
        // Neither is enough alone.
        trace(2 * GIB, 2 * GIB, 3 * GIB).prints(&[
            "verdict: outside torch: 3.00 GiB missing for this request. This process holds 2.00 GiB outside torch's allocator, and the \
             CUDA context and untraced memory take 2.00 GiB instead of the usual 0.3 to 0.6 GiB; without the former and with the latter at \
             its usual size, 3.50 GiB would fit.",
            libraries,
            extensions,
        ]);
        // Too little of the card, and too little for the request.
        trace(2 * GIB, 512 * MIB, 512 * MIB)
            .prints(&["also: this process holds 2.00 GiB outside torch's allocator"]);
        trace(2 * GIB, 512 * MIB, 512 * MIB).never_prints("verdict: outside torch");
        trace(4 * GIB, 512 * MIB, 5 * GIB).never_prints("verdict: outside torch");
        trace(GIB, 512 * MIB, 512 * MIB).never_prints("outside torch");
    }
}
