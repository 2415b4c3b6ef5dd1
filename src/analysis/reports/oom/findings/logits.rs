//! The logits of a loss over many tokens, and their copies.

use memtrace_trace::units::Unit;

use super::super::finding::{OomCase, code_of};
use crate::state::block::Owner;

/// The tolerance, in bytes, when the sizes of two blocks are compared, because the allocator rounds sizes.
const ROUNDING: i64 = 1024;

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let logits = Some(logits(case)).filter(|bytes| case.evidence.is_material(*bytes))?;
    Some(format!(
        "head and loss on 1/8 of the tokens at a time, checkpointed ({}): the logits and their \
         copies take {} now",
        code_of("--chunk-loss 8"),
        units.show(logits)
    ))
}

/// Returns the bytes of a log-softmax request, plus the bytes of this step's live blocks of the same size or
/// half the size: the logits and their 16-bit originals. Returns 0 for a request of another op.
fn logits(case: &OomCase<'_>) -> i64 {
    if case.at.op() != "aten::_log_softmax" {
        return 0;
    }
    let request = case.evidence.request.bytes;
    let is_like = |bytes: i64| (bytes - request).abs() <= ROUNDING || (2 * bytes - request).abs() <= ROUNDING;
    let is_same = |(owner, bytes): &&(Owner, i64)| owner.step == case.at.row.step && is_like(*bytes);
    request + case.live.iter().filter(is_same).map(|(_, bytes)| bytes).sum::<i64>()
}
