//! A forward in evaluation mode that keeps a graph.

use memtrace_trace::units::Unit;

use super::super::eval_mode::EvaluationGraph;
use super::super::evidence::Evidence;
use super::super::finding::OomCase;
use super::{other_graph, unoptimized};

/// The remedy for an evaluation that keeps graphs, if it is unknown whether the program evaluates.
const EVALUATES: &str = "if this is an evaluation: torch.no_grad() or torch.inference_mode()";

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let Evidence { live, forwards, evaluation, .. } = &case.evidence;
    if evaluation.is_now && forwards.has_autograd && case.evidence.is_material(live.activations) {
        return Some(format!(
            "torch.no_grad() around this forward, if nothing trains through it: it runs in evaluation mode (model.eval()) and keeps a \
             graph for a backward: {} of activations",
            units.show(live.activations)
        ));
    }
    if let Some(EvaluationGraph { root, bytes }) = &evaluation.graph {
        return Some(format!(
            "torch.no_grad() around the forward of {root}, if nothing trains through it: it runs in evaluation mode (model.eval()) and \
             keeps a graph for a backward: {} of activations",
            units.show(*bytes)
        ));
    }
    unoptimized::remedy(case, units)
        .or_else(|| (may_evaluate(case) && is_larger(case)).then(|| EVALUATES.to_owned()))
}

/// A model in training mode may be evaluated, too, but a long input is more common.
pub(super) fn remedy_if(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    let evaluation = &case.evidence.evaluation;
    let is_named = evaluation.is_now || evaluation.graph.is_some();
    (may_evaluate(case) && !is_named && !is_larger(case)).then(|| EVALUATES.to_owned())
}

/// Returns true if the request's model evaluates, in a step that is larger than earlier ones.
fn is_larger(case: &OomCase<'_>) -> bool {
    case.evidence.is_larger_than_before() && case.oom_state.evaluates()
}

/// Returns true if the request may be of an evaluation: no backward has run yet, or the step is larger
/// than earlier ones, so that it may do another kind of work.
fn may_evaluate(case: &OomCase<'_>) -> bool {
    // An optimizer that waits for its first step shows that the program trains.
    let is_training = case.evidence.to_come.of_optimizer.class.is_some() && !case.oom_state.evaluates();
    let may = case.oom_state.is_untrained() && !is_training
        || case.oom_state.is_in_forward() && case.evidence.is_larger_than_before();
    case.needs_less() && may && case.evidence.forwards.has_autograd && other_graph::find(case).is_none()
}

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// The line for a model whose mode is unknown.
    const IF: &str = "try: if this is an evaluation: torch.no_grad() or torch.inference_mode()";

    /// The forward of `Net` fails after these facts about models. `is_trained` says whether a backward has run before.
    fn trace(is_trained: bool, facts: &[&str]) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.call("Net", "Net", 0);
        if is_trained {
            trace.backward(0);
            trace.call("Net", "Net", 1);
        }
        let step = i64::from(is_trained);
        for fact in facts {
            trace.fact(fact, step);
        }
        trace.fill(512 * MIB, owner("Net.layers", "forward", step));
        trace.fails(GIB, owner("Net.layers", "forward", step));
        trace
    }

    /// Adds a search that finds no graph.
    fn without_graph(mut trace: OomTrace) -> OomTrace {
        trace.found(&[]);
        trace
    }

    #[test]
    fn oom_advises_no_grad_for_an_evaluation_after_a_training() {
        trace(true, &["mode=eval Net"]).prints(&[
            "try: torch.no_grad() around this forward, if nothing trains through it: it runs in evaluation mode (model.eval()) and keeps \
             a graph for a backward: 23.00 GiB of activations",
        ]);
        trace(true, &["mode=eval Net", "mode=train Net"]).never_prints("torch.no_grad()");
        without_graph(trace(true, &["mode=eval Net"])).never_prints("torch.no_grad()");
    }

    #[test]
    fn oom_advises_no_grad_for_a_model_that_was_never_trained() {
        trace(false, &["mode=eval Net"]).prints(&[
            "try: torch.no_grad() around the forward of Net, if nothing trains through it: it runs in evaluation mode (model.eval()) and \
             keeps a graph for a backward: 23.00 GiB of activations",
        ]);
        trace(false, &["mode=eval Net"]).never_prints(IF);
        without_graph(trace(false, &["mode=eval Net"])).never_prints("torch.no_grad()");
    }

    #[test]
    fn oom_advises_no_grad_if_a_first_forward_is_an_evaluation() {
        trace(false, &[]).prints(&[IF]);
        // A backward has run, an optimizer waits for its first step, and no graph exists.
        trace(true, &[]).never_prints("torch.no_grad()");
        trace(false, &["optimizer=AdamW Net"]).never_prints("torch.no_grad()");
        without_graph(trace(false, &[])).never_prints("torch.no_grad()");
    }
}
