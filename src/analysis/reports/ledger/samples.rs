//! Reads the `sample` rows of a trace, which show the memory in use on a device beyond what traced calls
//! account for. Also reads the names of NCCL's communicators.

use memtrace_trace::ledger::{Accounted, Rest};
use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use super::communicators::Communicators;
use crate::error::Result;
use crate::options::Options;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::state::categories::KnownCategories;
use crate::state::replay::Metric;
use crate::state::replay_trace::replay_trace;

/// A sample of a device, with the part of it that no traced call explains (`rest`).
#[derive(Clone, Copy)]
pub(super) struct DeviceSample {
    pub(super) ts_ns: i64,
    seq: i64,
    pub(super) sample: Sample,
    pub(super) rest: Rest,
}

/// All samples of a trace, by device, and the communicators, whose names are recorded later than their
/// memory.
pub(super) struct DeviceSamples {
    samples: FxHashMap<i32, Vec<DeviceSample>>,
    pub(super) communicators: Communicators,
}

/// Returns true if the call allocates managed memory, which moves between host and device.
pub(super) fn is_managed(api: &str) -> bool {
    Api::parse(api).is_some_and(Api::is_managed)
}

impl DeviceSamples {
    /// Reads all samples of the trace, also those after the moment of the ledger, because the first sample
    /// may come after it.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn read(trace: &TraceFile, options: &Options) -> Result<DeviceSamples> {
        let mut samples: FxHashMap<i32, Vec<DeviceSample>> = FxHashMap::default();
        let mut communicators = Communicators::default();
        // For each block of managed memory, by `alloc_id`: the device, and the bytes.
        let mut managed: FxHashMap<i64, (i32, i64)> = FxHashMap::default();
        let columns = Columns::of(&["api", "name"]);
        replay_trace(trace, columns, options, Metric::Used, KnownCategories::default(), |row, replay| {
            match row.event {
                EventName::ExtAlloc if is_managed(&replay.symbols.get(row.api)) => {
                    managed.insert(row.alloc_id, (row.device, row.delta_bytes));
                }
                EventName::ExtFree => {
                    managed.remove(&row.alloc_id);
                }
                EventName::Mark => communicators.feed(&replay.symbols.get(row.name)),
                EventName::Sample => {
                    let totals = replay.find(row.device).map(|device| device.totals).unwrap_or_default();
                    let elsewhere: i64 = managed
                        .values()
                        .filter(|(device, _)| *device == row.device)
                        .map(|(_, bytes)| bytes)
                        .sum();
                    let accounted =
                        Accounted { reserved: totals.reserved, outside: totals.outside - elsewhere };
                    let sample = Sample::parse(&replay.symbols.get(row.name));
                    let samples = samples.entry(row.device).or_default();
                    match samples.last_mut() {
                        // A sample without a total adds its values to the sample before it: pools and graphs
                        // have a row of their own, directly after the row with the total.
                        Some(last) if sample.total.is_none() => {
                            last.sample = last.sample.updated(sample);
                            last.rest = Rest::new(&last.sample, accounted);
                        }
                        _ => samples.push(DeviceSample {
                            ts_ns: row.ts_ns,
                            seq: row.seq,
                            sample,
                            rest: Rest::new(&sample, accounted),
                        }),
                    }
                }
                _ => {}
            }
        })?;
        Ok(DeviceSamples { samples, communicators })
    }

    /// Returns the sample that applies at row `seq`. As at a replay's peak, this is the sample directly
    /// before or directly after the row, whichever has more memory without a traced call.
    pub(super) fn at(&self, device: i32, seq: i64) -> Option<DeviceSample> {
        let samples = self.samples.get(&device)?;
        let next = samples.partition_point(|sample| sample.seq <= seq);
        let around = &samples[next.saturating_sub(1)..samples.len().min(next + 1)];
        around.iter().max_by_key(|sample| sample.rest.total()).copied()
    }
}
