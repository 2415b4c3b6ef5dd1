//! Start/end ranges, which any thread may end.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::runtime::fork::ForkSafe;
use crate::runtime::state_version;
use crate::runtime::thread::open_ranges::OpenRange;

/// The open start/end ranges of all threads.
static STARTED: ForkSafe<Vec<OpenRange>> = ForkSafe::new(Vec::new());
/// Start/end ranges that another thread ended: the thread that started them has them on its stack still.
static ENDED: ForkSafe<Vec<u64>> = ForkSafe::new(Vec::new());
/// Ids of start/end ranges and of phases. A tool that was loaded first counts from 1, and the program holds
/// its ids: ours must differ from them.
static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 62);

/// A new id.
pub(crate) fn new_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// A range has started.
pub(crate) fn add(range: OpenRange) {
    STARTED.with(|started| started.push(range));
}

/// Removes the range `id`, which ends. Returns `None` if it is not open.
pub(crate) fn take(id: u64) -> Option<OpenRange> {
    STARTED.with(|started| {
        let index = started.iter().rposition(|range| range.id == id)?;
        Some(started.swap_remove(index))
    })
}

/// The row of the range's begin is written.
pub(crate) fn set_has_row(id: u64) {
    STARTED.with(|started| {
        started.iter_mut().filter(|range| range.id == id).for_each(|range| range.has_row = true);
    });
}

/// A thread has ended the range of another thread, which has to drop it.
pub(crate) fn ended_elsewhere(id: u64) {
    ENDED.with(|ended| ended.push(id));
    state_version::advance();
}

/// Drops the ranges of a thread that other threads have ended.
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

/// The thread that started the range ends; another thread may still end the range.
pub(crate) fn orphan(id: u64) {
    ENDED.with(|ended| ended.retain(|other| *other != id));
    STARTED.with(|started| {
        started.iter_mut().filter(|range| range.id == id).for_each(|range| range.is_orphan = true);
    });
}

/// In the child of a fork: only the ranges of the thread that forked are left.
pub(crate) fn keep_only(open: &[OpenRange]) {
    STARTED.with(|started| started.clone_from(&open.iter().filter(|range| range.id != 0).copied().collect()));
    ENDED.with(Vec::clear);
}
