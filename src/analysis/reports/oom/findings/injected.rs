//! A request that `--phantom-fault` made fail.

use super::super::finding::{Blame, Cause};

pub(super) static CAUSE: Cause = Cause {
    verdict: "injected",
    find: |evidence| evidence.request.is_injected.then(|| Blame::of(&CAUSE)),
    missing: |_, _| String::new(),
    because: |case, units| {
        let request = units.show(case.evidence.request.bytes);
        format!("--phantom-fault made the request for {request} fail; the device had room")
    },
    tries: |_| vec!["nothing: the fault tests how the program recovers"],
    ..Cause::DEFAULT
};
