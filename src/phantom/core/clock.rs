//! The time of one device, shared by the device and its streams.

use std::sync::atomic::{AtomicU64, Ordering};

/// Device time and the epoch of its memory.
#[derive(Debug, Default)]
pub(crate) struct DeviceClock {
    /// Nanoseconds of work launched so far. Only work advances it, so it is the same in every run.
    time_ns: AtomicU64,
    /// Counts the launches after which the content of memory is unknown.
    epoch: AtomicU64,
}

impl DeviceClock {
    /// Device time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.time_ns.load(Ordering::Relaxed)
    }

    /// Adds work that takes `nanoseconds`.
    pub(crate) fn advance(&self, nanoseconds: u64) {
        self.time_ns.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// The epoch. [`KnownValues`](crate::core::values::KnownValues) of an older epoch are invalid.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Begins a new epoch: a launch may have written any value anywhere.
    pub(crate) fn invalidate_values(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }
}
