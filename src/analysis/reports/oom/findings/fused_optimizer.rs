//! The temporary results of an optimizer's step, which a fused optimizer does not have.

use memtrace_trace::units::Unit;

use super::super::finding::{OomCase, UNSURE};

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let to_come = &case.evidence.to_come;
    // Other optimizers, such as Muon, have no fused step. While Adam still allocates state, its temporary
    // results are to come.
    let is_to_come = to_come.bytes > 0 && case.at.whole.found.has_foreach_adam();
    if !case.is_in_foreach && !is_to_come {
        return None;
    }
    let temporaries = Some(to_come.step_temporaries).filter(|bytes| case.evidence.is_material(*bytes))?;
    // While the optimizer still allocates state, the temporary results are still to come, so add them
    // to the need.
    let whole = case.evidence.needs_at_least() + to_come.bytes + temporaries;
    let is_short = to_come.bytes > 0 && temporaries < (whole - case.evidence.device.capacity) / 4 * 5;
    Some(format!(
        "fused=True for torch's Adam, AdamW, SGD or Adagrad, whose step then needs no temporary results for all \
         parameters: about {}{}",
        units.show(temporaries),
        if is_short { UNSURE } else { "" }
    ))
}
