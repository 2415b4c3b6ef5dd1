//! The memory of the devices of a process: totals, peaks, and the blocks of a peak.

use memtrace_trace::Category;
use memtrace_trace::ledger::{Accounted, Rest};
use memtrace_trace::memory::{DeviceTotals, Metric, Totals};
use memtrace_trace::sample::Sample;

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
    /// For device memory in use: the part that no traced call explains.
    pub untraced: i64,
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
        Moment { bytes: 0, seq: 0, ts_ns: 0, owner, untraced: 0 }
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
    /// The largest sum of the allocated memory and a request that failed (OOM) in the window, in bytes; 0 without one.
    pub wanted_at_oom: i64,
    /// The number of live blocks.
    pub live_blocks: u64,
    /// The bytes of all blocks allocated in the window, live or freed.
    pub(super) total_allocated: i64,
    /// Of these, the bytes of freed blocks without an owner.
    pub(super) unowned: Unowned,
    /// Blocks that were live at the peak of the tracked metric and are freed now. They are a part of the
    /// peak, so this does not grow with the trace.
    pub(super) gone: Vec<Block>,
    /// The last sample of the device; `None` before the first.
    pub(super) sampled: Option<Sampled>,
    /// The highest sampled host memory of the process and its children, if the device shares host memory.
    host_peak: Option<i64>,
    /// Bytes of live managed memory, which is wherever it was touched last.
    pub(super) managed: i64,
    /// The difference between the totals and the sums of the deltas: allocated, reserved.
    pub(super) drift: (i64, i64),
    /// True if the allocated bytes exceeded the reserved bytes in the last row.
    pub(super) is_above: bool,
}

/// A sample of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampled {
    sample: Sample,
    /// The `seq` of its row.
    seq: i64,
    /// The memory beyond what traced calls account for, in bytes.
    rest: i64,
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
    /// Returns the peak of `metric` in bytes, or the memory that a failed request (OOM) would have needed, if that is
    /// more. A gate that ignored the request would pass a program that outgrew the card and went on.
    #[must_use]
    pub fn peak_with_failed(&self, metric: Metric) -> i64 {
        self.peak(metric).bytes.max(self.wanted_at_oom)
    }

    /// Makes the totals the peak of `metric` where they are higher. The blocks at the peak of `tracked` are kept.
    pub(super) fn raise(&mut self, metric: Metric, seq: i64, ts_ns: i64, owner: Owner, tracked: Metric) {
        let bytes = self.totals.get(metric);
        let peak = &mut self.peaks[metric as usize];
        if bytes > peak.bytes {
            *peak = Moment { bytes, seq, ts_ns, owner, untraced: self.totals.untraced };
            if metric == tracked {
                self.gone.clear();
            }
        }
    }

    /// Returns true if a sample has the memory in use on the device.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.sampled.is_some()
    }

    /// The memory of other processes in the last sample, in bytes; `None` where the driver does not say.
    #[must_use]
    pub fn others(&self) -> Option<i64> {
        self.sampled?.sample.others
    }

    /// The memory of this process and its children on the host in the last sample, if the device shares it.
    #[must_use]
    pub fn host(&self) -> Option<i64> {
        self.sampled?.sample.host
    }

    /// The most that [`host`](Self::host) was.
    #[must_use]
    pub fn host_peak(&self) -> Option<i64> {
        self.host_peak
    }

    /// The name of `metric` in reports: memory in use is known only with samples.
    #[must_use]
    pub fn name_of(&self, metric: Metric) -> &'static str {
        if metric == Metric::Used && !self.is_sampled() { Metric::UNSAMPLED } else { metric.name() }
    }

    /// Takes a sample. At a peak between two samples, the memory without a traced call is the larger of the
    /// two samples' values; before the first sample, it is that sample's value. The ledger uses the same
    /// rule.
    pub(super) fn add_sample(&mut self, new: Sample, seq: i64) {
        let last = self.sampled.filter(|_| new.total.is_none());
        let sample = last.map_or(new, |last| last.sample.updated(new));
        if sample.used().is_none() {
            return;
        }
        self.host_peak = self.host_peak.max(sample.host);
        let Totals { reserved, outside, .. } = self.summed_with_row();
        let accounted = Accounted { reserved, outside: outside.wrapping_sub(self.managed) };
        let rest = Rest::of(&sample, accounted).total();
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

    /// The totals of the last row.
    fn summed_with_row(&self) -> Totals {
        Totals { outside: self.summed.outside, ..self.totals }
    }

    /// Sets the memory without a traced call, after a sample or a change of managed memory.
    pub(super) fn count_untraced(&mut self) {
        if let Some(sampled) = self.sampled {
            let untraced = sampled.rest.wrapping_sub(self.managed);
            (self.totals.untraced, self.summed.untraced) = (untraced, untraced);
        }
    }

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
    /// The last sample, and its `seq`, of each device on which the process has no memory so far. A device
    /// that the process only queries has nothing to report.
    early: Vec<(i32, Sample, i64)>,
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

    /// Adds a sample to its device and returns the device. Returns `None` if no row has named the device yet:
    /// the sample is then kept for later.
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

    /// The devices without memory of the process, with its context and the memory of other processes there,
    /// by their last sample.
    pub(super) fn contexts(&self) -> impl Iterator<Item = (i32, i64, i64)> {
        let contexts = self
            .early
            .iter()
            .map(|(ordinal, sample, _)| (*ordinal, sample.process.unwrap_or(0), sample.others.unwrap_or(0)));
        contexts.filter(|(_, context, _)| *context > 0)
    }

    /// The index of that device.
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
