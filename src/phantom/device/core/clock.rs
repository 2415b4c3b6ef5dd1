//! The time of one device, shared by the device and its streams.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The clock of a device. It counts simulated time, not wall-clock time.
#[derive(Debug, Default)]
pub(crate) struct DeviceClock {
    /// The device time of the work launched so far, in nanoseconds. Only work advances it, so it
    /// is the same in every run.
    time_ns: AtomicU64,
    /// A word in shared memory that holds a copy of the time, for other processes. It is unset until
    /// [`show`](Self::show) is called.
    shown: OnceLock<&'static AtomicU64>,
}

impl DeviceClock {
    /// Returns the device time in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.time_ns.load(Ordering::Relaxed)
    }

    /// Advances the device time by work that takes `nanoseconds`.
    pub(crate) fn advance(&self, nanoseconds: u64) {
        let before = self.time_ns.fetch_add(nanoseconds, Ordering::Relaxed);
        if let Some(shown) = self.shown.get() {
            shown.store(before + nanoseconds, Ordering::Relaxed);
        }
    }

    /// Makes the clock store the device time in this word, too, from now on. Only the first call has an
    /// effect.
    pub(crate) fn show(&self, word: &'static AtomicU64) {
        let _ = self.shown.set(word);
    }
}
