//! Collects the slices, instants and memory curves of one process from its rows.

use memtrace_trace::{Api, EventName, host};
use rustc_hash::FxHashMap;

use super::super::downsample::{DownsampledCurve, Largest, Point};
use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::replay::{HOST, Replay, is_gpu};

/// The maximum number of stretches in the curve of a counter. A screen has far fewer pixel columns.
const STRETCHES: usize = 16_384;

/// The maximum number of open ranges that are kept per thread. The limit is for programs that never close
/// their ranges.
const MOST_OPEN: usize = 4096;

/// The id of the track of steps. No thread has an id this low.
pub(super) const STEPS: i32 = 1;
/// The id of the track of phases. No thread has an id this low.
pub(super) const PHASES: i32 = 2;

/// A range that began and has not ended yet.
struct OpenSlice {
    name: Symbol,
    api: Symbol,
    start_ns: i64,
}

/// A stretch of time on a track: an op, a range, a step or a phase.
pub(super) struct Slice {
    pub(super) tid: i32,
    pub(super) name: SliceName,
    pub(super) start_ns: i64,
    pub(super) end_ns: i64,
    pub(super) kind: SliceKind,
    pub(super) module: Symbol,
    pub(super) phase: Symbol,
    pub(super) bytes: i64,
}

pub(super) enum SliceName {
    Text(Symbol),
    Step(i64),
}

#[derive(Clone, Copy)]
pub(super) enum SliceKind {
    /// A range of the program or of a module call, with the API that recorded it.
    Range(Symbol),
    /// A range that was not closed in the order of the thread's stack, with the API that recorded it.
    OutOfOrder(Symbol),
    Op,
    Band,
}

/// The collected content of one process.
pub(super) struct SliceCollector {
    pub(super) pid: i32,
    pub(super) curves: FxHashMap<i32, DownsampledCurve>,
    pub(super) slices: Largest<Slice>,
    /// The rows shown as instants.
    pub(super) instants: Largest<Record>,
    open: FxHashMap<i32, Vec<OpenSlice>>,
    /// The current step, and the time of its start.
    step: (i64, i64),
    /// The current phase, and the time of its start.
    phase: (Symbol, i64),
}

impl SliceCollector {
    pub(super) fn new(most: usize) -> SliceCollector {
        SliceCollector {
            pid: 0,
            curves: FxHashMap::default(),
            slices: Largest::new(most),
            instants: Largest::new(most),
            open: FxHashMap::default(),
            step: (-1, 0),
            phase: (Symbol::NONE, 0),
        }
    }

    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        self.pid = row.pid;
        match row.event {
            EventName::RangeBegin => {
                let open = self.open.entry(row.tid).or_default();
                if open.len() == MOST_OPEN {
                    open.remove(0);
                }
                open.push(OpenSlice { name: row.name, api: row.api, start_ns: row.ts_ns });
            }
            EventName::RangeEnd => {
                let open = self.open.entry(row.tid).or_default();
                if let Some(at) = open.iter().rposition(|begun| begun.name == row.name) {
                    let nested = at + 1 == open.len();
                    let begun = open.remove(at);
                    let kind =
                        if nested { SliceKind::Range(begun.api) } else { SliceKind::OutOfOrder(begun.api) };
                    self.slice(row, SliceName::Text(begun.name), begun.start_ns, kind);
                }
            }
            EventName::Op => {
                self.slice(
                    row,
                    SliceName::Text(row.op),
                    row.ts_ns.saturating_sub(row.latency_ns),
                    SliceKind::Op,
                );
            }
            EventName::Mark if *replay.symbols.get(row.api) == *Api::Backward.as_str() => {}
            EventName::Mark | EventName::Oom | EventName::Lost => {
                self.instants.add(i64::MAX, row.seq, *row);
            }
            EventName::Alloc | EventName::Free | EventName::ExtAlloc | EventName::ExtFree => {
                // An allocation and its free have the same weight and number, so both are kept or both are
                // dropped.
                self.instants.add(row.delta_bytes.saturating_abs(), row.alloc_id, *row);
            }
            EventName::Sample if row.device == HOST => self.host(row, replay),
            _ => {}
        }
        if row.event != EventName::Op && is_gpu(row.device) {
            self.count(row, replay);
        }
        if replay.step != self.step.0 {
            self.end_step(row.ts_ns);
            self.step = (replay.step, row.ts_ns);
        }
        if replay.phase != self.phase.0 {
            self.end_phase(row.ts_ns);
            self.phase = (replay.phase, row.ts_ns);
        }
    }

    /// Adds a sample of the process's resident memory: the total, and the anonymous part, which is not mapped
    /// from a file.
    fn host(&mut self, row: &Record, replay: &Replay) {
        if *replay.symbols.get(row.api) != *Api::ProcStatus.as_str() {
            return;
        }
        let (values, _) = host::parse(Api::ProcStatus, &replay.symbols.get(row.name));
        if let [Some(high), anonymous, ..] = values {
            let curve = self.curves.entry(HOST).or_insert_with(|| DownsampledCurve::new(STRETCHES));
            curve.add(Point { at: row.ts_ns, low: anonymous.unwrap_or(0), high });
        }
    }

    fn count(&mut self, row: &Record, replay: &Replay) {
        let Some(device) = replay.find(row.device) else { return };
        let (low, high) = (device.totals.allocated, device.totals.reserved);
        let curve = self.curves.entry(row.device).or_insert_with(|| DownsampledCurve::new(STRETCHES));
        curve.add(Point { at: row.ts_ns, low, high });
    }

    fn slice(&mut self, row: &Record, name: SliceName, start_ns: i64, kind: SliceKind) {
        let end_ns = row.ts_ns.max(start_ns);
        let (tid, module, phase, bytes) = (row.tid, row.module, row.phase, row.delta_bytes);
        let slice = Slice { tid, name, start_ns, end_ns, kind, module, phase, bytes };
        self.slices.add(end_ns.saturating_sub(start_ns), row.seq, slice);
    }

    fn band(&mut self, tid: i32, name: SliceName, start_ns: i64, end_ns: i64) {
        let (module, phase, kind, bytes) = (Symbol::NONE, Symbol::NONE, SliceKind::Band, 0);
        let slice = Slice { tid, name, start_ns, end_ns, kind, module, phase, bytes };
        self.slices.add(end_ns.saturating_sub(start_ns), start_ns, slice);
    }

    fn end_step(&mut self, now_ns: i64) {
        let (step, since_ns) = self.step;
        if step >= 0 {
            self.band(STEPS, SliceName::Step(step), since_ns, now_ns);
        }
    }

    fn end_phase(&mut self, now_ns: i64) {
        let (phase, since_ns) = self.phase;
        if phase != Symbol::NONE {
            self.band(PHASES, SliceName::Text(phase), since_ns, now_ns);
        }
    }

    /// Closes the step, the phase and the ranges that are open after the last row, which is at `now_ns`.
    pub(super) fn close(&mut self, now_ns: i64) {
        self.end_step(now_ns);
        self.end_phase(now_ns);
        for (tid, open) in std::mem::take(&mut self.open) {
            for begun in open {
                let row = Record { tid, ts_ns: now_ns, ..Record::default() };
                self.slice(&row, SliceName::Text(begun.name), begun.start_ns, SliceKind::Range(begun.api));
            }
        }
    }
}
