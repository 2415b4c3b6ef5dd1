//! The time of one device, shared by the device and its streams.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Device time.
#[derive(Debug, Default)]
pub(crate) struct DeviceClock {
    /// Nanoseconds of work launched so far. Only work advances it, so it is the same in every run.
    time_ns: AtomicU64,
    /// A copy of the time that other processes can see; set once.
    shown: OnceLock<&'static AtomicU64>,
}

impl DeviceClock {
    /// Device time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.time_ns.load(Ordering::Relaxed)
    }

    /// Adds work that takes `nanoseconds`.
    pub(crate) fn advance(&self, nanoseconds: u64) {
        let before = self.time_ns.fetch_add(nanoseconds, Ordering::Relaxed);
        if let Some(shown) = self.shown.get() {
            shown.store(before + nanoseconds, Ordering::Relaxed);
        }
    }

    /// Also stores the device time in this word from now on.
    pub(crate) fn show(&self, word: &'static AtomicU64) {
        let _ = self.shown.set(word);
    }
}
