//! The logits of a loss over many tokens, and their copies.

use memtrace_trace::units::Unit;

use super::super::finding::{OomCase, code_of};
use crate::state::block::Owner;

/// The tolerance, in bytes, when the sizes of two blocks are compared, because the allocator rounds sizes.
const ROUNDING: i64 = 1024;

/// The maximum number of dimensions of logits: batch, tokens and vocabulary. A map of classes for an image has four.
const MOST_OF_TOKENS: usize = 3;

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let logits = Some(logits(case)).filter(|bytes| case.evidence.is_material(*bytes))?;
    Some(format!(
        "head and loss on 1/8 of the tokens at a time, checkpointed ({}): the logits and their \
         copies take {}, with this request",
        code_of("--chunk-loss 8"),
        units.show(logits)
    ))
}

/// Returns the bytes of a log-softmax request, plus the bytes of this step's live blocks of the same size or
/// half the size: the logits and their 16-bit originals. Returns 0 for a request of another op.
fn logits(case: &OomCase<'_>) -> i64 {
    let shape = case.oom_state.symbols().get(case.oom_state.row.shape);
    if case.oom_state.op() != "aten::_log_softmax" || shape.matches('x').count() + 1 > MOST_OF_TOKENS {
        return 0;
    }
    let request = case.evidence.request.bytes;
    let is_like = |bytes: i64| (bytes - request).abs() <= ROUNDING || (2 * bytes - request).abs() <= ROUNDING;
    let is_same = |(owner, bytes): &&(Owner, i64)| owner.step == case.oom_state.row.step && is_like(*bytes);
    request + case.live.iter().filter(is_same).map(|(_, bytes)| bytes).sum::<i64>()
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A loss in step 1 fails at a request of 4 GiB, after logits of 16 bits and their float32 copy in step `made`.
    fn trace(op: &str, shape: &str, made: i64) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        let loss = owner("(script)", "forward", 1);
        trace.block(2 * GIB, Row { step: made, ..loss });
        trace.block(4 * GIB, Row { step: made, ..loss });
        trace.fill(512 * MIB, Row { module: "Net", ..loss });
        trace.fails(4 * GIB, Row { op, shape, dtype: "float32", ..loss });
        trace
    }

    #[test]
    fn oom_advises_a_loss_in_parts_for_logits() {
        let parts = |bytes: &str| {
            format!(
                "try: head and loss on 1/8 of the tokens at a time, checkpointed (code: memtrace advise --chunk-loss 8 TRACE): the \
                 logits and their copies take {bytes}, with this request"
            )
        };
        trace("aten::_log_softmax", "[8192x131072]", 1).prints(&[&parts("10.00 GiB")]);
        trace("aten::_log_softmax", "?", 1).prints(&[&parts("10.00 GiB")]);
        // Blocks of the step before are of another batch.
        trace("aten::_log_softmax", "[8192x131072]", 0).prints(&[&parts("4.00 GiB")]);
        // Another op, and the classes of each pixel of an image.
        trace("aten::_softmax", "[8192x131072]", 1).never_prints("head and loss");
        trace("aten::_log_softmax", "[16x64x1024x1024]", 1)
            .never_prints("try: head and loss on 1/8 of the tokens");
    }
}
