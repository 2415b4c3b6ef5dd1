//! The graph of another model, from which no backward has run.

use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use super::super::retained_holders::is_of_forward;
use crate::state::retained::Holder;

/// Returns a variable of the script that holds a large graph, if no backward has run yet, the request is
/// in a forward, and more than one root module was called. The graph probably belongs to another model.
pub(super) fn find<'a>(case: &'a OomCase<'_>) -> Option<&'a Holder> {
    let is_it = |holder: &&Holder| {
        holder.graphs > 0
            && case.evidence.is_material(holder.bytes)
            && !is_of_forward(holder)
            && ["local", "global"].contains(&holder.text("kind"))
    };
    let are_several = || case.oom_state.seen.forwards.roots(case.oom_state.symbols()) > 1;
    case.evidence.holders.iter().find(is_it).filter(|_| case.oom_state.is_untrained() && are_several())
}

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let held = find(case).filter(|_| case.evidence.evaluation.graph.is_none())?;
    Some(format!(
        "torch.no_grad() around the model of {}, if nothing trains through it: its graph takes {}",
        held.holder,
        units.show(held.bytes)
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// The forward of `Net` fails after that of another root. The search finds a variable.
    fn trace(other: &str, has_backward: bool, holder: Value) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        if has_backward {
            trace.backward(0);
        }
        trace.call(other, "Encoder", 0);
        trace.block(6 * GIB, owner(other, "forward", 0));
        trace.call("Net", "Net", 0);
        trace.fill(512 * MIB, owner("Net", "forward", 0));
        trace.fails(GIB, owner("Net", "forward", 0));
        trace.found(&[holder]);
        trace
    }

    #[test]
    fn oom_advises_no_grad_for_the_graph_of_another_model() {
        let graph = || json!({ "graphs": 1, "tensors": 0 });
        trace("Encoder", false, graph()).prints(&[
            "try: torch.no_grad() around the model of variable `x` (train.py:7), if nothing trains through it: its graph takes 6.00 GiB",
        ]);
        let never = |other: &str, has_backward, holder: Value| {
            trace(other, has_backward, holder).never_prints("torch.no_grad() around the model of");
        };
        // A part of the same model; a program that trains; no graph; a variable of the forward; an attribute.
        never("Net.encoder", false, graph());
        never("Encoder", true, graph());
        never("Encoder", false, json!({ "graphs": 0 }));
        never("Encoder", false, json!({ "graphs": 1, "owner": "Net.forward" }));
        never("Encoder", false, json!({ "graphs": 1, "kind": "attribute" }));
        never("Encoder", false, json!({ "graphs": 1, "bytes": GIB }));
    }
}
