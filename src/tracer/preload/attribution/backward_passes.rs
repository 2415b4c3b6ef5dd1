//! Backward passes: how many backward functions have run, and whether the gradients of the next pass are
//! reported.
//!
//! The Python side reports gradients after a backward pass of the main thread, from a call that the
//! interpreter runs there. While the pass runs the main thread waits for it, so a call that is scheduled when
//! the pass begins runs when the pass is over.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The count of backward functions that have begun.
static FUNCTIONS: AtomicU64 = AtomicU64::new(0);
/// True if the next backward pass has gradients to report.
static ARE_GRADIENTS_DUE: AtomicBool = AtomicBool::new(true);
/// Schedules the report of gradients. Returns false on failure.
static SCHEDULE: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets the function that schedules the report of gradients on the main thread; once, by the Python side.
pub(crate) fn set_schedule(schedule: fn() -> bool) {
    let _ = SCHEDULE.set(schedule);
}

/// Counts a backward function that begins, on any thread. `is_of_main` means that the main thread ran its
/// forward op and so waits for this pass; then the report of gradients is scheduled. The main thread does not
/// wait for the pass of another thread, which reports its gradients itself.
#[inline]
pub(crate) fn function_begins(is_of_main: bool) {
    FUNCTIONS.fetch_add(1, Ordering::Relaxed);
    if is_of_main
        && ARE_GRADIENTS_DUE.load(Ordering::Relaxed)
        && let Some(schedule) = SCHEDULE.get()
        && ARE_GRADIENTS_DUE.swap(false, Ordering::Relaxed)
        && !schedule()
    {
        ARE_GRADIENTS_DUE.store(true, Ordering::Relaxed);
    }
}

/// Counts backward work that only an allocation shows: outside the detailed steps, torch reports no backward
/// function.
pub(crate) fn runs_unseen() {
    FUNCTIONS.fetch_add(1, Ordering::Relaxed);
}

/// Notes that a forward, an optimizer's step or `zero_grad` runs: the next backward pass has gradients to
/// report.
#[inline]
pub(crate) fn gradients_are_due() {
    if !ARE_GRADIENTS_DUE.load(Ordering::Relaxed) {
        ARE_GRADIENTS_DUE.store(true, Ordering::Relaxed);
    }
}

/// The number of backward functions that have begun.
pub(crate) fn functions() -> u64 {
    FUNCTIONS.load(Ordering::Relaxed)
}
