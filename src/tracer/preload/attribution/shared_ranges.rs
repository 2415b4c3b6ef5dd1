//! Start/end ranges, which any thread may end.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::runtime::fork::ForkSafe;
use crate::runtime::state_version;
use crate::runtime::thread::open_ranges::OpenRange;

/// The open start/end ranges of all threads.
static STARTED: ForkSafe<Vec<OpenRange>> = ForkSafe::new(Vec::new());
/// The ids of start/end ranges that another thread ended and that are still on the stack of the thread that
/// started them.
static ENDED: ForkSafe<Vec<u64>> = ForkSafe::new(Vec::new());
/// The next id of a start/end range or a phase. The program may also hold ids of another NVTX tool, which
/// counts from 1. So our ids start far above, to differ from that tool's ids.
static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 62);

/// Returns an id that no other start/end range or phase of this process has.
pub(crate) fn new_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// Adds a start/end range to the list of open ranges, so that any thread can end it.
pub(crate) fn add(range: OpenRange) {
    STARTED.with(|started| started.push(range));
}

/// Removes and returns the range `id`, because it ends. Returns `None` if no such range is open.
pub(crate) fn take(id: u64) -> Option<OpenRange> {
    STARTED.with(|started| {
        let index = started.iter().rposition(|range| range.id == id)?;
        Some(started.swap_remove(index))
    })
}

/// Records that the trace has a row for the beginning of a range.
pub(crate) fn set_has_row(id: u64) {
    STARTED.with(|started| {
        started.iter_mut().filter(|range| range.id == id).for_each(|range| range.has_row = true);
    });
}

/// Records that a range was ended by a thread that did not start it. The thread that started the range must
/// remove it from its stack.
pub(crate) fn ended_elsewhere(id: u64) {
    ENDED.with(|ended| ended.push(id));
    state_version::advance();
}

/// Removes from a thread's stack the ranges that other threads have ended.
pub(crate) fn drop_ended(open: &mut Vec<OpenRange>) {
    if open.iter().any(|range| range.id != 0) {
        ENDED.with(|ended| {
            open.retain(|range| {
                let index = ended.iter().position(|id| *id == range.id && *id != 0);
                if let Some(index) = index {
                    ended.swap_remove(index);
                }
                index.is_none()
            });
        });
    }
}

/// Records that the thread that started a range ends. Another thread may still end the range.
pub(crate) fn orphan(id: u64) {
    ENDED.with(|ended| ended.retain(|other| *other != id));
    STARTED.with(|started| {
        started.iter_mut().filter(|range| range.id == id).for_each(|range| range.is_orphan = true);
    });
}

/// Keeps only the ranges of the forking thread, in the child of a fork.
pub(crate) fn keep_only(open: &[OpenRange]) {
    STARTED.with(|started| started.clone_from(&open.iter().filter(|range| range.id != 0).copied().collect()));
    ENDED.with(Vec::clear);
}
