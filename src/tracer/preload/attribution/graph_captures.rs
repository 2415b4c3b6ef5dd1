//! Counts the captures of CUDA graphs that are in progress. One counter serves the whole process, because
//! autograd's threads also allocate for a capture. A private-pool block that is handed out during a capture
//! belongs to the graph.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::runtime::state_version;

static OPEN: AtomicU32 = AtomicU32::new(0);

/// Returns true while a stream captures a graph.
pub(crate) fn is_any_open() -> bool {
    OPEN.load(Ordering::Relaxed) > 0
}

/// Records that a capture begins.
pub(crate) fn begin() {
    OPEN.fetch_add(1, Ordering::Relaxed);
    state_version::advance();
}

/// Records that a capture has ended, with a graph or without one.
pub(crate) fn end() {
    // The count does not include a capture that began before the hooks were installed, so it stops at 0.
    let less = |open: u32| open.checked_sub(1);
    let _ = OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    state_version::advance();
}
