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
    let are_several = || case.at.seen.forwards.roots(case.at.symbols()) > 1;
    case.evidence.holders.iter().find(is_it).filter(|_| case.at.is_untrained() && are_several())
}

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let held = find(case).filter(|_| case.evidence.evaluation.graph.is_none())?;
    Some(format!(
        "torch.no_grad() around the model of {}, if nothing trains through it: its graph takes {}",
        held.holder,
        units.show(held.bytes)
    ))
}
