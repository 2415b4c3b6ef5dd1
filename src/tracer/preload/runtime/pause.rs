//! Pauses the rows of ops and ranges. Memory events are always recorded.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::runtime::state_version;

static PAUSED: AtomicBool = AtomicBool::new(false);

/// Returns true if the rows of ops and ranges are paused.
#[inline]
pub(crate) fn is_paused() -> bool {
    PAUSED.load(Ordering::Relaxed)
}

/// Pauses or resumes the rows of ops and ranges. Owners of memory are tracked during a pause, too.
///
/// A range whose `range_begin` row is in the trace gets its end row even during a pause. A range that opened
/// during the pause and is still open at the resume gets its begin row then.
pub(crate) fn set_paused(paused: bool) {
    PAUSED.store(paused, Ordering::Relaxed);
    state_version::advance();
}
