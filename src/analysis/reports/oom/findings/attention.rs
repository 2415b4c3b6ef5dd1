//! Attention that writes all of its scores to memory, as a model does that multiplies queries and keys itself.

use memtrace_trace::units::Unit;

use super::super::attention::names_attention;
use super::super::finding::OomCase;

/// Attention that writes its scores to memory runs ops with these texts in their names.
const SCORES: [&str; 6] = ["softmax", "bmm", "matmul", "masked_fill", "::where", "dropout"];

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    if !is_attention(case) {
        return None;
    }
    let scores = scores(case);
    let takes = if scores > 0 { format!(": they take {} now", units.show(scores)) } else { String::new() };
    let unsure = case.unsure(scores);
    Some(format!(
        "torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for nn.MultiheadAttention), which never \
         holds all scores at once{takes}{unsure}"
    ))
}

/// Returns true if scores of attention take a significant share of the card, or the request is for them.
pub(super) fn is_attention(case: &OomCase<'_>) -> bool {
    let at = case.at;
    let is_named = || names_attention(&at.module()) || case.lines.iter().any(|line| names_attention(line));
    let is_of_scores = || SCORES.iter().any(|part| at.op().contains(part));
    let is_fused = || at.seen.attention.is_fused(at.row.module, at.symbols());
    case.evidence.is_material(scores(case)) || is_of_scores() && !is_fused() && is_named()
}

/// Returns the bytes of attention's scores, including the request.
fn scores(case: &OomCase<'_>) -> i64 {
    let request = (case.at.row.module, case.evidence.request.bytes);
    case.at.seen.attention.scores(case.live.iter().copied(), request, case.at.symbols())
}
