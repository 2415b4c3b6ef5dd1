//! The peaks of each step on each device.

use std::collections::BTreeMap;

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;

use crate::options::Options;
use crate::read::record::Record;
use crate::state::block::Owner;
use crate::state::problems::Retries;
use crate::state::replay::{Metric, Replay, Totals, is_gpu};

/// The memory of one device during one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepMemory {
    /// The time of the step's first row, in ns since the start of the trace.
    pub(super) from_ns: i64,
    /// The time of the step's last row, in ns since the start of the trace.
    pub(super) to_ns: i64,
    /// The highest values, in bytes, in the order of [`Metric::ALL`].
    pub(super) peaks: [i64; 4],
    /// The time of the highest allocated bytes, in ns since the start of the trace.
    pub(super) peak_ns: i64,
    /// The owner of the row with the highest allocated bytes. If the memory never rises above its amount at
    /// the start of the step, the owner of the step's first row.
    pub(super) owner: Owner,
    /// The allocated bytes at the end of the step.
    pub(super) end_allocated: i64,
    /// The reserved bytes at the end of the step.
    pub(super) end_reserved: i64,
    /// The number of blocks allocated in the step.
    pub(super) allocations: u64,
    /// The sum of the sizes of the blocks allocated in the step, in bytes.
    pub(super) allocated_sum: i64,
    /// The allocator's retries, and the requests that ran out of memory.
    pub(super) retries: Retries,
}

impl StepMemory {
    /// Starts a step at `row`. `before` has the totals before the row.
    fn new(row: &Record, ts_ns: i64, before: &Totals) -> StepMemory {
        StepMemory {
            from_ns: ts_ns,
            to_ns: ts_ns,
            peaks: Metric::ALL.map(|metric| before.get(metric)),
            peak_ns: ts_ns,
            owner: Owner::from_row(row),
            end_allocated: before.allocated,
            end_reserved: before.reserved,
            allocations: 0,
            allocated_sum: 0,
            retries: Retries::default(),
        }
    }
}

/// The memory of each step on each device that has a row in the step.
#[derive(Default)]
pub(super) struct Steps {
    /// The memory of each step, by device and step.
    pub(super) list: BTreeMap<(i32, i64), StepMemory>,
    /// The totals of each device after the device's last row.
    totals: FxHashMap<i32, Totals>,
}

impl Steps {
    /// Adds a row, after `replay` processed it.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay, options: &Options) {
        let wanted = is_gpu(row.device) && options.device.is_none_or(|only| only == row.device);
        let Some(device) = replay.find(row.device).filter(|_| wanted) else { return };
        // The memory that is live when a step begins counts toward the step's peak.
        let before = self.totals.insert(device.ordinal, device.totals).unwrap_or_default();
        // The end row belongs to no step.
        if !replay.in_window() || row.event == EventName::End {
            return;
        }
        let ts_ns = replay.ts_ns;
        let memory = self
            .list
            .entry((device.ordinal, replay.step))
            .or_insert_with(|| StepMemory::new(row, ts_ns, &before));
        memory.to_ns = ts_ns;
        if device.totals.allocated > memory.peaks[Metric::Allocated as usize] {
            (memory.peak_ns, memory.owner) = (ts_ns, Owner::from_row(row));
        }
        for metric in Metric::ALL {
            let peak = &mut memory.peaks[metric as usize];
            *peak = (*peak).max(device.totals.get(metric));
        }
        (memory.end_allocated, memory.end_reserved) = (device.totals.allocated, device.totals.reserved);
        if row.event == EventName::Alloc {
            memory.allocations += 1;
            memory.allocated_sum = memory.allocated_sum.wrapping_add(row.delta_bytes);
        }
        memory.retries.feed(row);
    }
}
