//! This process's memory on the host, which the device shares.

use memtrace_trace::units::Unit;

use super::super::finding::{Blame, Cause, OomCase};

pub(super) static CAUSE: Cause = Cause {
    verdict: "host memory",
    // The host is named only if its memory is at least half as large as torch's blocks.
    find: |evidence| {
        let host = evidence.device.host?;
        (evidence.is_enough(host) && 2 * host >= evidence.torch.allocated).then(|| Blame::of(&CAUSE))
    },
    because: |case, units| {
        format!(
            "device and host share one memory, and this process holds {} of it on the host; without that, {} would fit",
            units.show(case.evidence.device.host.unwrap_or(0)),
            units.show(case.evidence.request.bytes)
        )
    },
    tries: |_| {
        vec![
            "avoid copies on the host, which shares the memory: load weights straight to the device, use fewer workers (offloading frees nothing); memtrace ledger --host names the holders",
        ]
    },
    ..Cause::DEFAULT
};

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let device = &case.evidence.device;
    let host = device.host.filter(|host| case.evidence.is_part(*host, 20) && !case.is_caused_by(&CAUSE))?;
    Some(format!("this process holds {} on the host, in the same memory", units.show(host)))
}

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A device of 24 GiB without room, of which the program holds `host` on the host.
    fn trace(host: i64, sample: &str) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.sample(512 * MIB + host, sample);
        trace.fill(512 * MIB, owner("Net", "forward", 0));
        trace.fails(GIB, owner("Net", "forward", 0));
        trace
    }

    #[test]
    fn oom_says_that_the_program_holds_shared_memory_on_the_host() {
        let shared = |host: i64| trace(host, &format!("others=0 cache=0 host={host}"));
        shared(10 * GIB).prints(&[
            "verdict: host memory: 512.00 MiB missing for this request. Device and host share one memory, and this process holds 10.00 \
             GiB of it on the host; without that, 1.00 GiB would fit.",
            "try: avoid copies on the host, which shares the memory: load weights straight to the device, use fewer workers (offloading \
             frees nothing); memtrace ledger --host names the holders",
        ]);
        // Less than half of torch's blocks; too little for a remark.
        shared(4 * GIB).prints(&["also: this process holds 4.00 GiB on the host, in the same memory"]);
        shared(4 * GIB).never_prints("host memory");
        shared(GIB).never_prints("on the host");
        // A device with a memory of its own.
        trace(10 * GIB, "others=0").never_prints("on the host");
    }
}
