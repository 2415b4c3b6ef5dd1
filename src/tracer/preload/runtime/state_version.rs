//! The version of the process-wide state that thread contexts depend on.
//!
//! A thread caches its context, together with the version at which it was computed. The cache is valid while
//! that version is current. Each change of that state increases the version. Examples are a new phase or
//! step, a pause, a graph capture, the start of the recorder, and a range that another thread ends.

use std::sync::atomic::{AtomicU64, Ordering};

/// The version. It starts at 1, so that a thread's version of 0 never matches and forces a recomputation.
static VERSION: AtomicU64 = AtomicU64::new(1);

/// Returns the current version. Callers read it before the state, so that a change in between invalidates the
/// context that they cache.
#[inline]
pub(crate) fn current() -> u64 {
    VERSION.load(Ordering::Acquire)
}

/// Invalidates the cached context of every thread.
#[inline]
pub(crate) fn advance() {
    VERSION.fetch_add(1, Ordering::AcqRel);
}
