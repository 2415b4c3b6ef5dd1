//! The samples of devices.

use memtrace_trace::ledger::{Accounted, Rest};
use memtrace_trace::sample::Sample;
use rustc_hash::FxHashMap;

/// The last samples of each device.
#[derive(Default)]
pub(crate) struct Samples {
    /// The last known value of each field of a sample.
    known: FxHashMap<i8, Sample>,
    /// The memory that the samples show and the trace does not account for.
    rests: FxHashMap<i8, Rest>,
}

impl Samples {
    /// Adds a sample of a device, of whose memory the trace accounts for `accounted`.
    pub(crate) fn add(&mut self, device: i8, sample: Sample, accounted: Accounted) {
        let known = self.known.entry(device).or_default();
        *known = known.updated(sample);
        self.rests.insert(device, Rest::new(known, accounted));
    }

    /// Returns the last known value of each field of a sample of a device. All values are unknown before the first
    /// sample.
    pub(crate) fn known(&self, device: i8) -> Sample {
        self.known.get(&device).copied().unwrap_or_default()
    }

    /// Returns the memory of a device that the trace did not account for at its last sample.
    pub(crate) fn rest(&self, device: i8) -> Rest {
        self.rests.get(&device).copied().unwrap_or_default()
    }
}
