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
    tries: |_| vec!["raise or remove the limit: torch.cuda.set_per_process_memory_fraction"],
    ..Cause::DEFAULT
};
