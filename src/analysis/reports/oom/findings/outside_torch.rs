//! This process's memory outside torch's allocator, without which the request would fit.

use memtrace_trace::units::Unit;

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
        if device.outside < device.large_context() {
            return format!(
                "the CUDA context and untraced memory take {} instead of the usual 0.3 to 0.6 GiB; \
                 at the usual size, {request} would fit",
                units.show(device.unknown)
            );
        }
        format!(
            "this process holds {} outside torch's allocator; without it, {request} would fit",
            units.show(device.outside)
        )
    },
    tries: |_| {
        vec![
            "look for libraries beside torch (NCCL, a second framework, plain cudaMalloc): memtrace peak --of used",
        ]
    },
    help: Help::LowerPeak,
    ..Cause::DEFAULT
};

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let device = &case.evidence.device;
    (!case.is_caused_by(&CAUSE) && case.evidence.is_part(device.outside, 20))
        .then(|| format!("this process holds {} outside torch's allocator", units.show(device.outside)))
}
