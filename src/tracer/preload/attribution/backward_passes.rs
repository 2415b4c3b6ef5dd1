//! Backward passes: counts the backward functions that have begun, and schedules the report of gradients
//! after a pass.
//!
//! The Python side reports gradients after a backward pass of the main thread, from a call that the
//! interpreter runs there. While the pass runs, the main thread waits for it, so a call that is scheduled
//! when the pass begins runs when the pass is over.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The number of backward functions that have begun, plus the number of calls of [`runs_unseen`].
static FUNCTIONS: AtomicU64 = AtomicU64::new(0);
/// True if gradients must be reported after the next backward pass.
static ARE_GRADIENTS_DUE: AtomicBool = AtomicBool::new(true);
/// The function that schedules the report of gradients and returns false on failure. Unset until the tracer
/// is installed.
static SCHEDULE: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets the function that schedules the report of gradients on the main thread. The Python side calls this
/// once.
pub(crate) fn set_schedule(schedule: fn() -> bool) {
    let _ = SCHEDULE.set(schedule);
}

/// Counts a backward function that begins, on any thread. `is_of_main` is true if the main thread ran the
/// function's forward op. The main thread then waits for this pass, so the report of gradients is scheduled.
/// For the pass of another thread, nothing is scheduled, because that thread reports its gradients itself at
/// its next forward.
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

/// Counts an allocation on one of autograd's threads outside the detailed steps. There, torch reports no
/// backward functions, so the allocation is the only sign of a backward.
pub(crate) fn runs_unseen() {
    FUNCTIONS.fetch_add(1, Ordering::Relaxed);
}

/// Records that the next backward pass has gradients to report. Called when a forward begins and when torch's
/// scope of an optimizer or a `DataLoader` begins. Until an optimizer has stepped, it is also called when the
/// first backward function after a forward begins.
#[inline]
pub(crate) fn gradients_are_due() {
    if !ARE_GRADIENTS_DUE.load(Ordering::Relaxed) {
        ARE_GRADIENTS_DUE.store(true, Ordering::Relaxed);
    }
}

/// Returns the number of backward functions that have begun. Outside the detailed steps, torch reports no
/// backward functions, so the allocations that [`runs_unseen`] counts are added instead.
pub(crate) fn functions() -> u64 {
    FUNCTIONS.load(Ordering::Relaxed)
}
