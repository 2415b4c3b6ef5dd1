//! A request that `--phantom-fault` made fail.

use super::super::finding::{Blame, Cause};

pub(super) static CAUSE: Cause = Cause {
    verdict: "injected",
    find: |evidence| evidence.request.is_injected.then(|| Blame::of(&CAUSE)),
    missing: |_, _| String::new(),
    because: |case, units| {
        let request = units.show(case.evidence.request.bytes);
        let failed = format!("--phantom-fault made the request for {request} fail");
        match case.evidence.lacking() {
            0 => format!("{failed}; the device had room"),
            _ => format!(
                "{failed}, and without the fault it would fail, too: {} is free on the device",
                case.room_text(units)
            ),
        }
    },
    tries: |case| match case.evidence.lacking() {
        0 => vec!["nothing: the fault tests how the program recovers"],
        _ => {
            vec!["run the program without --phantom-fault: memtrace oom then explains why the request fails"]
        }
    },
    ..Cause::DEFAULT
};

#[cfg(test)]
mod tests {
    use memtrace_trace::{Api, Row};

    use super::super::super::test_evidence::GIB;
    use super::super::super::test_trace::{OomTrace, owner};

    fn trace(api: Api, bytes: i64) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.fails(bytes, Row { api: api.as_str(), ..owner("Net", "forward", 0) });
        trace
    }

    #[test]
    fn oom_says_that_a_fault_made_the_request_fail() {
        trace(Api::InjectedFault, GIB).prints(&[
            "verdict: injected. --phantom-fault made the request for 1.00 GiB fail; the device had room.",
            "try: nothing: the fault tests how the program recovers",
        ]);
        // The fault came at a request for which the card has no room.
        trace(Api::InjectedFault, 30 * GIB).prints(&[
            "verdict: injected. --phantom-fault made the request for 30.00 GiB fail, and without the fault it would fail, too: \
             23.50 GiB is free on the device.",
            "try: run the program without --phantom-fault: memtrace oom then explains why the request fails",
        ]);
        trace(Api::CachingAllocator, GIB).never_prints("injected");
    }
}
