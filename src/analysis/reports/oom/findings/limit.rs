//! A limit of torch that forbade the allocation although the device had room.

use super::super::finding::{Blame, Cause};

pub(super) static CAUSE: Cause = Cause {
    verdict: "a limit",
    find: |evidence| {
        let has_room = evidence.request.failed_calls == 0 && evidence.device.room >= evidence.request.segment;
        (evidence.device.capacity > 0 && has_room).then(|| Blame::of(&CAUSE))
    },
    missing: |_, _| String::new(),
    because: |case, units| {
        format!("{} is free on the device, but a limit of torch forbids its use", case.room_text(units))
    },
    tries: |_| {
        vec![
            "raise or remove the limit: torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in \
             PYTORCH_CUDA_ALLOC_CONF",
        ]
    },
    ..Cause::DEFAULT
};

#[cfg(test)]
mod tests {
    use memtrace_trace::Meta;

    use super::super::super::test_evidence::GIB;
    use super::super::super::test_trace::{OomTrace, owner};

    #[test]
    fn oom_says_that_torch_has_a_limit() {
        let refused = |mut trace: OomTrace| {
            trace.fails_at_once(GIB, owner("Net", "forward", 0));
            trace
        };
        refused(OomTrace::new(24 * GIB)).prints(&[
            "verdict: a limit. 23.50 GiB is free on the device, but a limit of torch forbids its use.",
            "try: raise or remove the limit: torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in \
             PYTORCH_CUDA_ALLOC_CONF",
        ]);
        refused(OomTrace::without_sample(24 * GIB, Meta::default())).prints(&[
            "verdict: a limit. At most 24.00 GiB is free on the device, but a limit of torch forbids its use.",
        ]);
        // CUDA refused the segment; the device has no room.
        let mut asked = OomTrace::new(24 * GIB);
        asked.fails(GIB, owner("Net", "forward", 0));
        asked.never_prints("limit of torch");
        let mut full = OomTrace::new(24 * GIB);
        full.block(23 * GIB, owner("Net", "forward", 0));
        refused(full).never_prints("limit of torch");
    }
}
