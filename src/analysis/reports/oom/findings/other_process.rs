//! Another process, without whose memory the request would fit.

use memtrace_trace::units::Unit;

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
    let (others, request) = (units.show(device.others), units.show(case.evidence.request.bytes));
    if device.host.is_some() {
        return format!(
            "the system and other programs hold {others} of the memory that the device shares; without them, {request} would \
             fit"
        );
    }
    let names = case.neighbours.as_ref().map(|others| format!(" ({})", others.text));
    format!(
        "other processes hold {others} of this card's {}{}; without them, {request} would fit",
        units.show(device.capacity),
        names.unwrap_or_default()
    )
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let device = &case.evidence.device;
    let who = if device.host.is_some() { "the system and other programs" } else { "other processes" };
    (!case.is_caused_by(&CAUSE) && case.evidence.is_part(device.others, 20))
        .then(|| format!("{who} hold {} of this card", units.show(device.others)))
}
