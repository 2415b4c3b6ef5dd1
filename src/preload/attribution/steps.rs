//! The step of the process: counted from the optimizer, from the forwards of a program that trains nothing, or
//! set by the program.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use memtrace_record::intern::{TextId, with_tables};
use memtrace_record::recorder::STEP;

use crate::attribution::{detail, growth};
use crate::ffi::phantom;
use crate::runtime::state_version;

/// True if the program numbers its steps itself.
static SET_BY_PROGRAM: AtomicBool = AtomicBool::new(false);
/// The optimizer that stepped first: its steps are counted.
static FIRST_OPTIMIZER: AtomicU32 = AtomicU32::new(0);

/// The current step; -1 before training.
#[inline]
pub(crate) fn current() -> i32 {
    STEP.load(Ordering::Relaxed)
}

/// Returns true if the program has set a step. Then memtrace counts none.
pub(crate) fn are_set_by_program() -> bool {
    SET_BY_PROGRAM.load(Ordering::Relaxed)
}

/// A step begins.
fn begins(step: i32) {
    detail::step_begins(step);
    growth::step_begins();
}

/// The program sets the step. A step lasts until the next one is set: the time between two step ranges
/// belongs to the first of them.
pub(crate) fn set(step: i64) {
    SET_BY_PROGRAM.store(true, Ordering::Relaxed);
    let step = i32::try_from(step).unwrap_or(i32::MAX);
    let before = STEP.swap(step, Ordering::Relaxed);
    phantom::step_begins(step);
    if before != step {
        begins(step);
    }
    if before < 0 {
        // The phase before the first step is `init`.
        state_version::advance();
    }
}

/// Ends step -1, when a forward, a backward or another sign of training is seen.
pub(crate) fn training_began() {
    if current() < 0 && !are_set_by_program() {
        STEP.store(0, Ordering::Relaxed);
        phantom::step_begins(0);
        begins(0);
        state_version::advance();
    }
}

/// A further forward of the model that a program without any training runs: it begins a step. The first forward
/// began step 0.
pub(crate) fn forward_begins() {
    if are_set_by_program() || FIRST_OPTIMIZER.load(Ordering::Relaxed) != 0 {
        return;
    }
    let step = current().max(0) + 1;
    STEP.store(step, Ordering::Relaxed);
    phantom::step_begins(step);
    begins(step);
}

/// A user scope of this name has ended: a step of the first optimizer ends the training step.
pub(crate) fn scope_ended(name: TextId) {
    let is_step = |name: TextId| with_tables(|tables| tables.text_of(name).starts_with("Optimizer.step#"));
    if !is_step(name) || are_set_by_program() {
        return;
    }
    let first = FIRST_OPTIMIZER.compare_exchange(0, name, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_ok() || first == Err(name) {
        let step = current().max(0) + 1;
        STEP.store(step, Ordering::Relaxed);
        phantom::step_begins(step);
        begins(step);
    }
}
