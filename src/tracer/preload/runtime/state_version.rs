//! The version of the process-wide state that thread contexts depend on.
//!
//! A thread caches its context, together with the version at which it was computed. The cache is valid while
//! that version is current. The version grows when the phase, the step or the pause changes, when the
//! recorder starts, and when a thread ends a range of another thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// Starts at 1: a thread's version 0 never matches, so setting it forces a recomputation.
static VERSION: AtomicU64 = AtomicU64::new(1);

/// Returns the current version.
#[inline]
pub(crate) fn current() -> u64 {
    VERSION.load(Ordering::Acquire)
}

/// Invalidates the cached context of every thread.
#[inline]
pub(crate) fn advance() {
    VERSION.fetch_add(1, Ordering::AcqRel);
}
