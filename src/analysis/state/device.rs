//! The memory of the devices of a process: totals, peaks, and the blocks of a peak.

use memtrace_trace::Category;
use memtrace_trace::ledger::{Accounted, Rest};
use memtrace_trace::memory::{DeviceTotals, Metric, Totals};
use memtrace_trace::sample::Sample;

use crate::read::symbols::Symbol;
use crate::state::block::{Block, Owner};

/// The moment of the highest value of a total.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// The total, in bytes.
    pub bytes: i64,
    /// The `seq` of the row that reached the total.
    pub seq: i64,
    /// The time, in ns since the start of the trace.
    pub ts_ns: i64,
    /// The owner that the row names.
    pub owner: Owner,
    /// For a peak of device memory in use: the bytes that no traced call explains.
    pub untraced: i64,
}

impl Default for Peak {
    fn default() -> Self {
        let owner = Owner {
            op: Symbol::NONE,
            module: Symbol::NONE,
            phase: Symbol::NONE,
            category: Category::None,
            step: -1,
        };
        Peak { bytes: 0, seq: 0, ts_ns: 0, owner, untraced: 0 }
    }
}

/// The memory of one device.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// The CUDA ordinal, or [`HOST`](super::replay::HOST).
    pub ordinal: i32,
    /// The totals after the device's last row.
    pub totals: Totals,
    /// The totals, computed as sums of the deltas. For torch's memory, the sums are exact only if every
    /// column is read.
    pub summed: Totals,
    /// The peak of each metric, in the order of [`Metric::ALL`].
    pub peaks: [Peak; 4],
    /// The largest sum of the allocated memory and a failed request (OOM) in the window, in bytes; 0 if no
    /// request failed.
    pub wanted_at_oom: i64,
    /// The number of live blocks.
    pub live_blocks: u64,
    /// The id of the block that stands in for the live blocks without rows of their own (`brief` rows); 0
    /// before the first.
    pub(super) brief: i64,
    /// The bytes of all blocks allocated in the window, live or freed.
    pub(super) total_allocated: i64,
    /// The part of `total_allocated` that belongs to freed blocks without an owner.
    pub(super) unowned: Unowned,
    /// The blocks that were live at the peak of the tracked metric and were freed since. Only blocks of one
    /// peak are kept, so their number does not grow with the length of the trace.
    pub(super) gone: Vec<Block>,
    /// The last sample of the device, or `None` before the first.
    pub(super) sampled: Option<Sampled>,
    /// The highest sampled host memory of the process and its children, if the device shares host memory.
    host_peak: Option<i64>,
    /// Bytes of live managed memory, which is in host or device memory, depending on which side touched it
    /// last.
    pub(super) managed: i64,
    /// The difference between the totals and the sums of the deltas, for allocated and for reserved bytes.
    pub(super) drift: (i64, i64),
    /// True if the allocated bytes exceeded the reserved bytes in the last row.
    pub(super) is_above: bool,
}

/// A sample of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampled {
    sample: Sample,
    /// The `seq` of the sample's row.
    seq: i64,
    /// The bytes in use at the sample that no traced call explains.
    rest: i64,
}

/// Bytes of freed blocks without an owner.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unowned {
    /// The bytes of all such blocks.
    pub(super) all: i64,
    /// The part of `all` that belongs to blocks for which a category is inferred.
    pub(super) inferred: i64,
}

impl Device {
    /// Returns the peak of `metric` in bytes, or the memory that a failed request (OOM) would have needed, if
    /// larger. A gate that ignored the request would pass a program that exceeded the memory of the GPU and
    /// continued.
    #[must_use]
    pub fn peak_with_failed(&self, metric: Metric) -> i64 {
        self.peak(metric).bytes.max(self.wanted_at_oom)
    }

    /// Sets the peak of `metric` to the current total if that is higher. For the metric `tracked`, also
    /// clears the freed blocks of the previous peak.
    pub(super) fn raise(&mut self, metric: Metric, seq: i64, ts_ns: i64, owner: Owner, tracked: Metric) {
        let bytes = self.totals.get(metric);
        let peak = &mut self.peaks[metric as usize];
        if bytes > peak.bytes {
            *peak = Peak { bytes, seq, ts_ns, owner, untraced: self.totals.untraced };
            if metric == tracked {
                self.gone.clear();
            }
        }
    }

    /// Returns true if a sample of the device's memory in use was read.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.sampled.is_some()
    }

    /// Returns the memory of other processes in the last sample, in bytes, or `None` if the driver does not
    /// report it.
    #[must_use]
    pub fn others(&self) -> Option<i64> {
        self.sampled?.sample.others
    }

    /// Returns the host memory of this process and its children in the last sample, if the device shares host
    /// memory.
    #[must_use]
    pub fn host(&self) -> Option<i64> {
        self.sampled?.sample.host
    }

    /// Returns the page cache in the last sample, if the device shares host memory: it counts as used, but an
    /// allocation can reclaim it.
    #[must_use]
    pub fn page_cache(&self) -> Option<i64> {
        self.sampled?.sample.cache
    }

    /// Returns the highest value of [`host`](Self::host).
    #[must_use]
    pub fn host_peak(&self) -> Option<i64> {
        self.host_peak
    }

    /// Returns the name of `metric` in reports. Without samples, the name of the memory in use says that it
    /// is incomplete.
    #[must_use]
    pub fn name_of(&self, metric: Metric) -> &'static str {
        if metric == Metric::Used && !self.is_sampled() { Metric::UNSAMPLED } else { metric.name() }
    }

    /// Adds a sample. At a peak between two samples, the memory without a traced call is the larger value of
    /// both samples. At a peak before the first sample, it is the value of the first sample. The ledger uses
    /// the same rule.
    pub(super) fn add_sample(&mut self, new: Sample, seq: i64) {
        let last = self.sampled.filter(|_| new.total.is_none());
        let sample = last.map_or(new, |last| last.sample.updated(new));
        if sample.used().is_none() {
            return;
        }
        self.host_peak = self.host_peak.max(sample.host);
        let Totals { reserved, outside, .. } = self.summed_with_row();
        let accounted = Accounted { reserved, outside: outside.wrapping_sub(self.managed) };
        let rest = Rest::new(&sample, accounted).total();
        let before = self.sampled.replace(Sampled { sample, seq, rest });
        let peak = &mut self.peaks[Metric::Used as usize];
        let more = match before {
            None if peak.bytes > 0 => rest.wrapping_sub(self.managed),
            Some(before) if peak.seq >= before.seq => rest.saturating_sub(before.rest).max(0),
            _ => 0,
        };
        peak.bytes = peak.bytes.wrapping_add(more);
        peak.untraced = peak.untraced.wrapping_add(more);
        self.count_untraced();
    }

    /// Returns the totals of the last row, except `outside`, which is the sum of the deltas.
    fn summed_with_row(&self) -> Totals {
        Totals { outside: self.summed.outside, ..self.totals }
    }

    /// Updates the memory without a traced call, after a sample or a change of managed memory.
    pub(super) fn count_untraced(&mut self) {
        if let Some(sampled) = self.sampled {
            let untraced = sampled.rest.wrapping_sub(self.managed);
            (self.totals.untraced, self.summed.untraced) = (untraced, untraced);
        }
    }

    /// Returns the first moment in the window at which the total of `metric` was highest.
    #[must_use]
    pub fn peak(&self, metric: Metric) -> &Peak {
        &self.peaks[metric as usize]
    }
}

/// The devices of a process.
#[derive(Clone, Default)]
pub(super) struct Devices {
    /// The devices, sorted by ordinal.
    pub(super) list: Vec<Device>,
    /// The index of the device of the last row.
    latest: usize,
    /// For each device on which the process has no memory so far: the last sample, and the `seq` of its row.
    /// Such a device is not in `list`, because a process may only query it.
    early: Vec<(i32, Sample, i64)>,
}

impl Devices {
    /// Returns the device `ordinal`, after adding it if it is new.
    #[inline]
    pub(super) fn device(&mut self, ordinal: i32) -> &mut Device {
        // Most rows are about the same device as the previous row.
        if self.list.get(self.latest).is_none_or(|device| device.ordinal != ordinal) {
            self.latest = self.place(ordinal);
        }
        &mut self.list[self.latest]
    }

    /// Adds a sample to its device and returns the device. If no row has named the device yet, keeps the
    /// sample for later and returns `None`.
    pub(super) fn sample(&mut self, ordinal: i32, sample: Sample, seq: i64) -> Option<&mut Device> {
        if let Ok(at) = self.list.binary_search_by_key(&ordinal, |device| device.ordinal) {
            self.list[at].add_sample(sample, seq);
            return Some(&mut self.list[at]);
        }
        match self.early.iter_mut().find(|(known, ..)| *known == ordinal) {
            Some((_, known, last)) => (*known, *last) = (known.updated(sample), seq),
            None => self.early.push((ordinal, sample, seq)),
        }
        None
    }

    /// Returns the devices on which the process has a context but no memory: the ordinal and, from the last
    /// sample, the bytes of the context and the bytes of other processes.
    pub(super) fn contexts(&self) -> impl Iterator<Item = (i32, i64, i64)> {
        let contexts = self
            .early
            .iter()
            .map(|(ordinal, sample, _)| (*ordinal, sample.process.unwrap_or(0), sample.others.unwrap_or(0)));
        contexts.filter(|(_, context, _)| *context > 0)
    }

    /// Returns the index of the device `ordinal`, after adding it if it is new.
    #[cold]
    fn place(&mut self, ordinal: i32) -> usize {
        match self.list.binary_search_by_key(&ordinal, |device| device.ordinal) {
            Ok(at) => at,
            Err(at) => {
                let mut device = Device { ordinal, ..Device::default() };
                if let Some(at) = self.early.iter().position(|(known, ..)| *known == ordinal) {
                    let (_, sample, seq) = self.early.swap_remove(at);
                    device.add_sample(sample, seq);
                }
                self.list.insert(at, device);
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
