//! A model that the program moves to the GPU although it has already run steps.

use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use super::{idle, too_big};
use crate::state::block::Owner;

/// If a step moves at least this many tensors to the GPU, they are assumed to be a model.
const FEWEST_OF_MODEL: usize = 8;

/// Returns true if a program that has already run steps moves as many tensors to the GPU as a model has,
/// outside of modules.
pub(super) fn is_loading(case: &OomCase<'_>) -> bool {
    let row = &case.oom_state.row;
    let is_like_it = |(owner, _): &&(Owner, i64)| {
        owner.op == row.op && owner.module == row.module && owner.step == row.step
    };
    case.is_caused_by(&too_big::CAUSE)
        && case.oom_state.is_copy()
        && row.step >= 0
        && case.oom_state.phase() != "optimizer"
        && case.live.iter().filter(is_like_it).count() >= FEWEST_OF_MODEL
}

pub(super) fn remedy_if(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    (is_loading(case) && idle::models(case).is_empty()).then(|| {
        "if a model that ran before is no longer needed: del it, with all that refers to it, before the next one is \
         moved to the GPU"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// Moves `tensors` tensors to the GPU in a step, and fails at the next one.
    fn trace(tensors: usize, row: Row<'_>) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.block(MIB, owner("Net", "forward", row.step.max(0) - 1));
        for _ in 0..tensors {
            trace.block(GIB, row);
        }
        trace.fill(512 * MIB, owner("Net", "forward", row.step));
        trace.fails(GIB, row);
        trace
    }

    #[test]
    fn oom_advises_to_delete_a_model_before_the_next_one_is_moved() {
        let moved = Row { op: "aten::_to_copy", ..owner("(script)", "(none)", 1) };
        trace(8, moved).prints(&[
            "try: if a model that ran before is no longer needed: del it, with all that refers to it, before the next one is moved to the \
             GPU",
        ]);
        for (tensors, row) in [
            (7, moved),
            (8, Row { step: -1, ..moved }),
            (8, Row { op: "aten::zeros", ..moved }),
            (8, Row { module: "Net", ..moved }),
        ] {
            trace(tensors, row).never_prints("if a model that ran before is no longer needed");
        }
    }
}
