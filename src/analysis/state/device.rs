//! The memory of the devices of a process: totals, peaks, and the blocks of a peak.

use memtrace_trace::Category;
use memtrace_trace::memory::{DeviceTotals, Metric, Totals};

use crate::read::symbols::Symbol;
use crate::state::block::{Block, Owner};

/// The moment of the highest value of a total.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The total, in bytes.
    pub bytes: i64,
    /// The `seq` of the row.
    pub seq: i64,
    /// The time, in ns since the start of the trace.
    pub ts_ns: i64,
    /// The owner in that row.
    pub owner: Owner,
}

impl Default for Moment {
    fn default() -> Self {
        let owner = Owner {
            op: Symbol::NONE,
            module: Symbol::NONE,
            phase: Symbol::NONE,
            category: Category::None,
            step: -1,
        };
        Moment { bytes: 0, seq: 0, ts_ns: 0, owner }
    }
}

/// The memory of one device.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// The CUDA ordinal, or [`HOST`](super::replay::HOST).
    pub ordinal: i32,
    /// The totals in its last row.
    pub totals: Totals,
    /// The sums of the deltas. Those of torch's memory are exact only when every column is read.
    pub summed: Totals,
    /// The peak of each metric, in the order of [`Metric::ALL`].
    pub peaks: [Moment; 4],
    /// The number of live blocks.
    pub live_blocks: u64,
    /// The bytes of all blocks allocated in the window, live or freed.
    pub(super) total_allocated: i64,
    /// Of these, the bytes of freed blocks without an owner.
    pub(super) unowned: Unowned,
    /// Blocks that were live at the peak of the tracked metric and are freed now. They are a part of the
    /// peak, so this does not grow with the trace.
    pub(super) gone: Vec<Block>,
    /// The difference between the totals and the sums of the deltas: allocated, reserved.
    pub(super) drift: (i64, i64),
}

/// Bytes of freed blocks without an owner.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unowned {
    /// All of them.
    pub(super) all: i64,
    /// Of these, bytes of blocks to which inference gives a category.
    pub(super) inferred: i64,
}

impl Device {
    /// The peak of `metric`.
    #[must_use]
    pub fn peak(&self, metric: Metric) -> &Moment {
        &self.peaks[metric as usize]
    }
}

/// The devices of a process.
#[derive(Default)]
pub(super) struct Devices {
    /// By ordinal.
    pub(super) list: Vec<Device>,
    /// The index of the device of the last row.
    latest: usize,
}

impl Devices {
    /// The device of that ordinal, new or known.
    #[inline]
    pub(super) fn device(&mut self, ordinal: i32) -> &mut Device {
        // Most rows are about the device of the row before.
        if self.list.get(self.latest).is_none_or(|device| device.ordinal != ordinal) {
            self.latest = self.place(ordinal);
        }
        &mut self.list[self.latest]
    }

    /// The index of that device.
    #[cold]
    fn place(&mut self, ordinal: i32) -> usize {
        match self.list.binary_search_by_key(&ordinal, |device| device.ordinal) {
            Ok(at) => at,
            Err(at) => {
                self.list.insert(at, Device { ordinal, ..Device::default() });
                at
            }
        }
    }
}

impl DeviceTotals for Devices {
    #[inline]
    fn totals_mut(&mut self, device: i32) -> &mut Totals {
        &mut self.device(device).summed
    }
}
