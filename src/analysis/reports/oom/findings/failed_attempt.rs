//! The graph of a failed attempt that is still live, and whose holder is unknown.

use super::super::finding::{Blame, Cause, Help, KEPT};
use super::super::limits::MATERIAL;

pub(super) static CAUSE: Cause = Cause {
    verdict: KEPT,
    // A search for the holder may end at its time limit, but the graph itself is in the trace.
    find: |evidence| {
        let bytes = evidence.live.of_failed_attempt;
        let is_most = bytes as f64 >= MATERIAL * evidence.torch.allocated as f64;
        (bytes >= evidence.lacking() && is_most).then(|| Blame::of(&CAUSE))
    },
    because: |case, units| {
        format!(
            "{} of an earlier attempt, which ran out of memory, are still live: something refers to its variables, such as \
             the traceback of its error; without them, {} would fit",
            units.show(case.evidence.live.of_failed_attempt),
            units.show(case.evidence.request.bytes)
        )
    },
    tries: |_| {
        vec![
            "in a notebook, sys.last_traceback keeps the variables of the last error: before the next attempt, \
             sys.last_exc = sys.last_value = sys.last_traceback = None and gc.collect(), or restart the kernel",
            "in a script, retry after the except block, not inside it, and del a variable that holds the exception",
        ]
    },
    help: Help::FreeKept,
    ..Cause::DEFAULT
};

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB, full};
    use super::super::super::test_trace::{OomTrace, owner};

    #[test]
    fn oom_blames_a_failed_attempt_whose_graph_is_still_live() {
        let retry = full().with(|e| e.live.of_failed_attempt = 4 * GIB);
        assert_eq!(retry.verdict(), "memory is kept");
        assert_eq!(retry.judge().kept, None);
        // A small part of the live memory; less than the request lacks.
        assert_eq!(retry.with(|e| e.live.of_failed_attempt = GIB).verdict(), "too big");
        let lacks = retry.with(|e| {
            e.request.bytes = 6 * GIB;
            e.request.segment = 6 * GIB;
        });
        assert_eq!(lacks.verdict(), "too big");
    }

    #[test]
    fn oom_says_that_an_earlier_attempt_is_still_live() {
        let attempts = |calls_again: bool| {
            let mut trace = OomTrace::new(24 * GIB);
            trace.call("Net", "Net", 0);
            trace.block(10 * GIB, owner("Net.layers", "forward", 0));
            trace.fails(20 * GIB, owner("Net.layers", "forward", 0));
            if calls_again {
                trace.call("Net", "Net", 0);
            }
            trace.fill(512 * MIB, owner("Net.layers", "forward", 0));
            trace.fails(GIB, owner("Net.layers", "forward", 0));
            trace
        };
        attempts(true).prints(&[
            "verdict: memory is kept: 512.00 MiB missing for this request. 10.00 GiB of an earlier attempt, which ran out of memory, are \
             still live: something refers to its variables, such as the traceback of its error; without them, 1.00 GiB would fit.",
            "try: in a notebook, sys.last_traceback keeps the variables of the last error: before the next attempt, sys.last_exc = \
             sys.last_value = sys.last_traceback = None and gc.collect(), or restart the kernel",
            "try: in a script, retry after the except block, not inside it, and del a variable that holds the exception",
        ]);
        attempts(false).never_prints("an earlier attempt");
    }
}
