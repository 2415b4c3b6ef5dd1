//! The version of the process-wide state that thread contexts depend on.
//!
//! A thread caches its context. The cache is valid while this version is the one it was computed at. The
//! version grows when the phase, the step or the pause changes, when the recorder starts, and when a thread
//! ends a range of another.

use std::sync::atomic::{AtomicU64, Ordering};

/// Starts at 1: a thread's version 0 never matches, so setting it forces a recomputation.
static VERSION: AtomicU64 = AtomicU64::new(1);

/// The current version.
#[inline]
pub(crate) fn current() -> u64 {
    VERSION.load(Ordering::Acquire)
}

/// Makes every thread recompute its context.
#[inline]
pub(crate) fn advance() {
    VERSION.fetch_add(1, Ordering::AcqRel);
}
