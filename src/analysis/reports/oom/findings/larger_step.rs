//! A step that takes much more memory than earlier ones, and its ops and modules.

use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use super::super::step_groups::Difference;
use super::{loading, too_big};
use crate::render::numbers::counted;

/// Returns the most that an earlier step took, if the program is too big and this step is larger.
fn usual(case: &OomCase<'_>) -> Option<i64> {
    case.evidence.larger_step().filter(|_| case.is_caused_by(&too_big::CAUSE))
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let usual = usual(case)?;
    Some(format!(
        "this step needs {} so far, with this request, and {} before it took at most {}: its inputs are larger, or it runs other code",
        units.show(case.evidence.taken_by_step()),
        counted(case.evidence.steps.finished.len() as u64, "step"),
        units.show(usual)
    ))
}

/// Returns the memory that is much larger than in earlier steps, if the program is too big and this step is
/// larger.
pub(in super::super) fn differences(case: &OomCase<'_>) -> Vec<Difference> {
    let (at, evidence) = (case.oom_state, &case.evidence);
    let groups = at.seen.groups.iter().find(|(device, _)| *device == at.row.device);
    let Some((_, groups)) = groups.filter(|_| usual(case).is_some()) else { return Vec::new() };
    let layers = at.replayed.replay.classes.layers([], at.symbols());
    groups.differences(&at.row, evidence.request.bytes, at.symbols(), &layers, evidence.device.capacity)
}

pub(super) fn remedy(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    (case.evidence.larger_step().is_some() && !loading::is_loading(case))
        .then(|| "a limit for the inputs of such a step: crop, split or skip them".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// Steps of 2 GiB, then a step that fills the card.
    fn trace(steps: i64, bytes: i64) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        for step in 0..steps {
            let id = trace.block(bytes, owner("Net", "forward", step));
            trace.free(id, bytes, owner("Net", "forward", step));
        }
        trace.fill(512 * MIB, owner("Net", "forward", steps));
        trace.fails(GIB, owner("Net", "forward", steps));
        trace
    }

    #[test]
    fn oom_says_that_a_step_needs_more_than_each_earlier_step() {
        trace(3, 2 * GIB).prints(&[
            "also: this step needs 24.00 GiB so far, with this request, and 3 steps before it took at most 2.00 GiB: its inputs are \
             larger, or it runs other code",
            "try: a limit for the inputs of such a step: crop, split or skip them",
        ]);
        for (steps, bytes) in [(2, 2 * GIB), (3, 20 * GIB)] {
            trace(steps, bytes).never_prints("this step needs");
            trace(steps, bytes).never_prints("a limit for the inputs");
        }
    }
}
