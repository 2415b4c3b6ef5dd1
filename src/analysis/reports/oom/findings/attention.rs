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
    let takes = if scores > 0 {
        format!(": they take {}, with this request", units.show(scores))
    } else {
        String::new()
    };
    let unsure = case.unsure(scores);
    Some(format!(
        "torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for nn.MultiheadAttention), which never \
         holds all scores at once{takes}{unsure}"
    ))
}

/// Returns true if scores of attention take a significant share of the card, or the request is for them.
pub(super) fn is_attention(case: &OomCase<'_>) -> bool {
    let at = case.oom_state;
    // A line begins with the path of its file. A folder may be called after a paper: `attention-is-all-you-need`.
    let of_file = |line: &str| line.rsplit('/').next().is_some_and(names_attention);
    let is_named = || names_attention(&at.module()) || case.lines.iter().any(|line| of_file(line));
    let is_of_scores =
        || SCORES.iter().any(|part| at.op().contains(part)) && !at.op().contains("log_softmax");
    let is_fused = || at.seen.attention.is_fused(at.row.module, at.symbols());
    case.evidence.is_material(scores(case)) || is_of_scores() && !is_fused() && is_named()
}

/// Returns the bytes of attention's scores, including the request.
fn scores(case: &OomCase<'_>) -> i64 {
    let request = (case.oom_state.row.module, case.evidence.request.bytes);
    case.oom_state.seen.attention.scores(case.live.iter().copied(), request, case.oom_state.symbols())
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{Category, Row};

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// What every line of the remedy begins with.
    const START: &str = "torch.nn.functional.scaled_dot_product_attention";

    /// The forward of a module with these ops, each of which has a result of 3 GiB, fails at `failed`.
    fn trace(module: &str, ops: &[&str], failed: Row<'_>) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        for op in ops {
            trace.block(3 * GIB, Row { op, ..owner(module, "forward", 0) });
        }
        trace.fill(512 * MIB, Row { op: "aten::addmm", ..owner("Net.head", "forward", 0) });
        trace.fails(3 * GIB, Row { category: Category::Activation, ..failed });
        trace
    }

    fn fails_at<'a>(op: &'a str, module: &'a str) -> Row<'a> {
        Row { op, ..owner(module, "forward", 0) }
    }

    #[test]
    fn oom_advises_fused_attention_for_scores() {
        let scores = ["aten::bmm", "aten::_softmax"];
        trace("Net.mix", &scores, fails_at("aten::native_dropout", "Net.mix")).prints(&[
            "try: torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for \
             nn.MultiheadAttention), which never holds all scores at once: they take 9.00 GiB, with this request, may not be enough alone",
        ]);
        // The module has no softmax, and its name does not tell.
        trace("Net.mix", &scores[..1], fails_at("aten::native_dropout", "Net.mix")).never_prints(START);
    }

    #[test]
    fn oom_advises_fused_attention_for_a_request_for_scores() {
        let request = |op, module| trace(module, &[], fails_at(op, module));
        request("aten::_softmax", "Net.attn").prints(&[
            "try: torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for \
             nn.MultiheadAttention), which never holds all scores at once, may not be enough alone",
        ]);
        // The projections of attention, a softmax elsewhere, and a loss.
        request("aten::addmm", "Net.attn").never_prints(START);
        request("aten::_softmax", "Net.mix").never_prints(START);
        request("aten::_log_softmax", "Net.attn").never_prints(START);
    }

    #[test]
    fn oom_advises_no_fused_attention_where_it_runs() {
        let fused = |ran_in: &str, failed: &str| {
            let mut trace = OomTrace::new(24 * GIB);
            trace.op(Row { op: "aten::scaled_dot_product_attention", ..owner(ran_in, "forward", 0) });
            trace.fill(512 * MIB, owner("Net.head", "forward", 0));
            trace.fails(3 * GIB, fails_at("aten::native_dropout", failed));
            trace
        };
        // The dropout of the output of the same layer, or of the next one.
        fused("Net.0.attn", "Net.0.attn").never_prints(START);
        fused("Net.0.attn", "Net.1.attn.resid_dropout").never_prints(START);
        fused("Net.0.attn", "Net.0.attn_own").prints(&[
            "try: torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for \
             nn.MultiheadAttention), which never holds all scores at once, may not be enough alone",
        ]);
    }

    #[test]
    fn oom_reads_attention_in_the_name_of_a_file_but_not_of_a_folder() {
        let line = |line: &str| {
            let mut trace = OomTrace::new(24 * GIB);
            let stack_id = trace.stack("python", line);
            trace.fill(512 * MIB, owner("Net.head", "forward", 0));
            trace.fails(3 * GIB, Row { stack_id, ..fails_at("aten::_softmax", "Net.mix") });
            trace
        };
        line("/home/me/model/attention.py:7 forward").prints(&[
            "try: torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for \
             nn.MultiheadAttention), which never holds all scores at once, may not be enough alone",
        ]);
        line("/home/me/attention-is-all-you-need/train.py:7 forward").never_prints(START);
    }
}
