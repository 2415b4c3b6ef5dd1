//! The graph of a failed attempt that is still live, and whose holder is unknown.

use super::super::evidence::MATERIAL;
use super::super::finding::{Blame, Cause, Help, KEPT};

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
    use super::super::super::test_evidence::{GIB, full};

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
}
