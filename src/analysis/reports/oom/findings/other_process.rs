//! Another process, without whose memory the request would fit.

use memtrace_trace::units::Unit;

use super::super::evidence::DeviceUse;
use super::super::finding::{Blame, Cause, Help, OomCase};

pub(super) static CAUSE: Cause = Cause {
    verdict: "another process",
    find: |evidence| evidence.is_enough(evidence.device.others).then(|| Blame::of(&CAUSE)),
    because,
    tries: |case| {
        vec![match &case.neighbours {
            _ if case.evidence.device.host.is_some() => {
                "end other programs: each takes memory that the device shares"
            }
            Some(others) => others.remedy,
            None => {
                "end the other process (nvidia-smi lists them), or choose another GPU: CUDA_VISIBLE_DEVICES"
            }
        }]
    },
    help: Help::LowerPeak,
    ..Cause::DEFAULT
};

fn because(case: &OomCase<'_>, units: Unit) -> String {
    let device = &case.evidence.device;
    let names = case.neighbours.as_ref().map(|others| format!(" ({})", others.text));
    format!(
        "{}{}; without them, {} would fit",
        hold(device, units),
        names.unwrap_or_default(),
        units.show(case.evidence.request.bytes)
    )
}

/// Returns who holds how much of which memory.
fn hold(device: &DeviceUse, units: Unit) -> String {
    let others = units.show(device.others);
    if device.host.is_some() {
        return format!("the system and other programs hold {others} of the memory that the device shares");
    }
    let probably = if device.are_others_guessed { " probably" } else { "" };
    format!("other processes{probably} hold {others} of this card's {}", units.show(device.capacity))
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let device = &case.evidence.device;
    (!case.is_caused_by(&CAUSE) && case.evidence.is_part(device.others, 20)).then(|| hold(device, units))
}

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A card of 24 GiB without room: beside the context and `others`, all is in torch's blocks but half a GiB.
    fn trace(others: i64, sample: &str) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.sample(512 * MIB + others, sample);
        trace.fill(512 * MIB, owner("Net", "forward", 0));
        trace.fails(GIB, owner("Net", "forward", 0));
        trace
    }

    #[test]
    fn oom_says_that_the_request_would_fit_without_other_processes() {
        let listed = |others: i64| trace(others, &format!("others={others}"));
        listed(4 * GIB).prints(&[
            "verdict: another process: 512.00 MiB missing for this request. Other processes hold 4.00 GiB of this card's 24.00 GiB; \
             without them, 1.00 GiB would fit.",
            "try: end the other process (nvidia-smi lists them), or choose another GPU: CUDA_VISIBLE_DEVICES",
        ]);
        // Too little to be the cause, and too little for a remark.
        listed(2 * GIB).prints(&["also: other processes hold 2.00 GiB of this card's 24.00 GiB"]);
        listed(2 * GIB).never_prints("another process");
        listed(GIB).never_prints("also: other processes");
        // The driver lists no processes. A context has at most 1 GiB of what is not traced.
        trace(4 * GIB, "").prints(&[
            "verdict: another process: 512.00 MiB missing for this request. Other processes probably hold 3.50 GiB of this card's \
             24.00 GiB; without them, 1.00 GiB would fit.",
        ]);
        // Without them, the request would not fit.
        let mut large = OomTrace::new(24 * GIB);
        large.sample(512 * MIB + 4 * GIB, &format!("others={}", 4 * GIB));
        large.block(19 * GIB, owner("Net", "forward", 0));
        large.fails(5 * GIB, owner("Net", "forward", 0));
        large.never_prints("another process");
    }

    #[test]
    fn oom_says_that_other_programs_share_the_memory_of_the_device() {
        let shared =
            |others: i64, cache: i64| trace(others + cache, &format!("others={others} cache={cache} host=0"));
        shared(4 * GIB, 0).prints(&[
            "verdict: another process: 512.00 MiB missing for this request. The system and other programs hold 4.00 GiB of the memory \
             that the device shares; without them, 1.00 GiB would fit.",
            "try: end other programs: each takes memory that the device shares",
        ]);
        shared(2 * GIB, 0).prints(&[
            "also: the system and other programs hold 2.00 GiB of the memory that the device shares",
        ]);
        // The page cache makes room by itself, so no program need end.
        shared(0, 4 * GIB).never_prints("other programs");
    }
}
