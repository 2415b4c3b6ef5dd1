//! A request that alone is larger than the memory that the card can give this process.

use super::super::evidence::DeviceUse;
use super::super::finding::{Blame, Cause, Help};
use super::attention::is_attention;

/// Returns the most memory that the card can give this process.
fn most(device: &DeviceUse) -> i64 {
    device.capacity - device.unknown
}

pub(super) static CAUSE: Cause = Cause {
    verdict: "request too large",
    find: |evidence| {
        let is_it = evidence.device.capacity > 0 && evidence.request.bytes > most(&evidence.device);
        is_it.then(|| Blame::of(&CAUSE))
    },
    missing: |case, units| {
        let device = &case.evidence.device;
        match device.needed_too_much() {
            Some(needed) => format!(": {} missing", units.show(needed - device.capacity)),
            None => format!(": at least {} missing", units.show(case.evidence.request.bytes - most(device))),
        }
    },
    because: |case, units| {
        let (request, device) = (case.evidence.request.bytes, &case.evidence.device);
        let context = match request > device.capacity {
            true => String::new(),
            false => format!(
                ", of which {} is not traced (the CUDA context, libraries)",
                units.show(device.unknown)
            ),
        };
        let card = units.show(device.capacity);
        format!("{} was asked for at once, and the card has {card} in all{context}", units.show(request))
    },
    tries: |case| match is_attention(case) {
        true => Vec::new(),
        false => vec!["make the inputs of this op smaller, or split the work into parts"],
    },
    help: Help::LowerNeed,
    ..Cause::DEFAULT
};

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    fn trace(bytes: i64) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.fails(bytes, Row { op: "aten::cdist", ..owner("Net", "forward", 0) });
        trace
    }

    #[test]
    fn oom_says_that_one_request_is_larger_than_the_card() {
        let remedy = "try: make the inputs of this op smaller, or split the work into parts";
        trace(30 * GIB).prints(&[
            "verdict: request too large: at least 6.50 GiB missing. 30.00 GiB was asked for at once, and the card has 24.00 GiB in all.",
            remedy,
        ]);
        // The context takes half a GiB.
        trace(24 * GIB).prints(&[
            "verdict: request too large: at least 512.00 MiB missing. 24.00 GiB was asked for at once, and the card has 24.00 GiB in \
             all, of which 512.00 MiB is not traced (the CUDA context, libraries).",
            remedy,
        ]);
        trace(24 * GIB - 512 * MIB).never_prints("request too large");
        // The need was measured, and the program needs more beside the request.
        let mut measured = trace(30 * GIB);
        measured.needed(40 * GIB);
        measured.prints(&[
            "verdict: request too large: 16.00 GiB missing. 30.00 GiB was asked for at once, and the card has 24.00 GiB in all.",
        ]);
    }

    #[test]
    fn oom_has_another_remedy_for_a_request_for_scores() {
        let scores = |op: &'static str| {
            let mut trace = OomTrace::new(24 * GIB);
            trace.fails(30 * GIB, Row { op, ..owner("Net.attn", "forward", 0) });
            trace
        };
        scores("aten::_softmax").never_prints("make the inputs of this op smaller");
        scores("aten::add")
            .prints(&["try: make the inputs of this op smaller, or split the work into parts"]);
    }
}
