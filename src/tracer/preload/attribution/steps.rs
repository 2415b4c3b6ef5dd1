//! The step of the process. Steps are set by the program, or counted: by the steps of an optimizer, by other
//! updates of parameters or, in a program that trains nothing, by its forwards.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memtrace_record::intern::{TextId, with_tables};
use memtrace_record::recorder::STEP;

use crate::attribution::{detail, growth};
use crate::ffi::phantom;
use crate::runtime::fork::ForkSafe;
use crate::runtime::{state_version, thread};

/// True if the program numbers its steps itself.
static SET_BY_PROGRAM: AtomicBool = AtomicBool::new(false);
/// The optimizer whose steps are counted: the address of its object or, if the object is unknown, the text id
/// of the scope of its step, which contains its class name. 0 before the first step, and after the object was
/// destroyed.
static COUNTED: AtomicUsize = AtomicUsize::new(0);
/// True once an optimizer of torch has stepped.
static HAVE_OPTIMIZER: AtomicBool = AtomicBool::new(false);
/// True once the program has updated parameters without an optimizer of torch.
static HAVE_UPDATES: AtomicBool = AtomicBool::new(false);
/// The optimizers that have stepped since the counted optimizer last stepped.
static OTHERS: ForkSafe<Vec<usize>> = ForkSafe::new(Vec::new());

/// Returns the current step; -1 before training.
#[inline]
pub(crate) fn current() -> i32 {
    STEP.load(Ordering::Relaxed)
}

/// Returns true if the program has set a step. From then on, memtrace does not count steps itself.
pub(crate) fn are_set_by_program() -> bool {
    SET_BY_PROGRAM.load(Ordering::Relaxed)
}

/// Notifies [`detail`] and [`growth`] that a step begins.
fn begins(step: i32) {
    detail::step_begins(step);
    growth::step_begins();
}

/// Returns the closest step that a row can have.
fn in_range(step: i64) -> i32 {
    step.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32
}

/// Sets the step, as the program requests. A step lasts until the next step is set, so the time between two
/// step ranges belongs to the first range.
pub(crate) fn set(step: i64) {
    SET_BY_PROGRAM.store(true, Ordering::Relaxed);
    let step = in_range(step);
    let before = STEP.swap(step, Ordering::Relaxed);
    if before != step {
        phantom::step_begins(step);
        begins(step);
    }
    if before < 0 {
        // The phase `init` ends with the first step, so the threads must recompute their contexts.
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

/// Returns true if an optimizer of torch has stepped.
#[inline]
pub(crate) fn have_optimizer() -> bool {
    HAVE_OPTIMIZER.load(Ordering::Relaxed)
}

/// Ends the current step and begins the next one, as memtrace counts them.
fn next_begins() {
    let step = current().max(0) + 1;
    STEP.store(step, Ordering::Relaxed);
    phantom::step_begins(step);
    begins(step);
}

/// Begins the next step, unless the program numbers its steps or an optimizer of torch has stepped. In a
/// program that trains nothing, each forward of the model except the first one begins a step. The first
/// forward began step 0.
pub(crate) fn forward_begins() {
    if !are_set_by_program() && !have_optimizer() {
        next_begins();
    }
}

/// Ends the training step, because the program has updated parameters without an optimizer of torch.
pub(crate) fn update_ended() {
    HAVE_UPDATES.store(true, Ordering::Relaxed);
    forward_begins();
}

/// Stores the address of the optimizer whose step returns on this thread. [`scope_ended`] reads it when the
/// scope of the step ends.
pub(crate) fn optimizer_stepped(optimizer: usize) {
    thread::with(|state| state.stepped_optimizer.set(optimizer));
}

/// Forgets an optimizer whose object is gone. The next optimizer that steps is counted instead.
pub(crate) fn forget_optimizer(optimizer: usize) {
    let _ = COUNTED.compare_exchange(optimizer, 0, Ordering::Relaxed, Ordering::Relaxed);
}

/// Returns the `key=value` word of the end row with the number of steps that have ended. `pending` adds one
/// step, for an update that is not counted yet. Empty if the program numbers its steps itself or has not
/// trained.
pub(crate) fn end_words(pending: bool) -> String {
    let ended = current().max(0) + i32::from(pending);
    let is_known = (have_optimizer() || HAVE_UPDATES.load(Ordering::Relaxed)) && !are_set_by_program();
    if is_known { format!("{}={ended}", memtrace_trace::end_row::STEPS) } else { String::new() }
}

/// Called when a user scope ends. The end of a step of the counted optimizer ends the training step.
pub(crate) fn scope_ended(name: TextId) {
    let is_step = |name: TextId| with_tables(|tables| tables.text_of(name).starts_with("Optimizer.step#"));
    if !is_step(name) {
        return;
    }
    HAVE_OPTIMIZER.store(true, Ordering::Relaxed);
    let object = thread::with(|state| state.stepped_optimizer.replace(0)).unwrap_or(0);
    let optimizer = if object == 0 { name as usize } else { object };
    if !are_set_by_program() && is_counted(optimizer) {
        next_begins();
    }
}

/// Returns true if a step of this optimizer ends a training step. The first optimizer that steps is counted.
/// If another optimizer steps twice between two steps of the counted optimizer, it becomes the counted
/// optimizer: the training is in another stage, or the other optimizer steps more often.
fn is_counted(optimizer: usize) -> bool {
    let first = COUNTED.compare_exchange(0, optimizer, Ordering::Relaxed, Ordering::Relaxed);
    OTHERS.with(|others| {
        let takes_over = others.contains(&optimizer);
        if first.is_ok() || first == Err(optimizer) || takes_over {
            COUNTED.store(optimizer, Ordering::Relaxed);
            others.clear();
            return true;
        }
        others.push(optimizer);
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_outside_the_range_of_rows_becomes_the_closest_step() {
        let steps = [i64::MIN, i64::from(i32::MIN) - 1, -1, 7, 1 << 31, i64::MAX];
        assert_eq!(steps.map(in_range), [i32::MIN, i32::MIN, -1, 7, i32::MAX, i32::MAX]);
    }
}
