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
    let row = &case.at.row;
    let is_like_it = |(owner, _): &&(Owner, i64)| {
        owner.op == row.op && owner.module == row.module && owner.step == row.step
    };
    case.is_caused_by(&too_big::CAUSE)
        && case.at.is_copy()
        && row.step >= 0
        && case.at.phase() != "optimizer"
        && case.live.iter().filter(is_like_it).count() >= FEWEST_OF_MODEL
}

pub(super) fn remedy_if(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    (is_loading(case) && idle::models(case).is_empty()).then(|| {
        "if a model that ran before is no longer needed: del it, with all that refers to it, before the next one is \
         moved to the GPU"
            .to_owned()
    })
}
