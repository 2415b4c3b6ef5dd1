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
