//! The slices, instants and memory curves of one process, collected from the rows.

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;

use super::super::downsample::{DownsampledCurve, Largest, Point};
use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::replay::{HOST, Replay};

/// A counter shows no more turns than a screen has columns, several times over.
const STRETCHES: usize = 16_384;

/// Of threads that end no range that they begin, the innermost of this many are known.
const MOST_OPEN: usize = 4096;

/// Tracks that are no thread: no process has a thread with an id that low.
pub(super) const STEPS: i32 = 1;
pub(super) const PHASES: i32 = 2;

/// A range that has not ended.
struct OpenSlice {
    name: Symbol,
    api: Symbol,
    start_ns: i64,
}

/// A slice of a track.
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
    /// A range that the program or a module's call opened: the call that told of it.
    Range(Symbol),
    /// One that did not end in the order of its thread's.
    Astray(Symbol),
    Op,
    Band,
}

/// What is shown as a moment.
pub(super) struct Instant {
    pub(super) row: Record,
}

/// What is kept of one process.
pub(super) struct SliceCollector {
    pub(super) pid: i32,
    pub(super) curves: FxHashMap<i32, DownsampledCurve>,
    pub(super) slices: Largest<Slice>,
    pub(super) instants: Largest<Instant>,
    open: FxHashMap<i32, Vec<OpenSlice>>,
    /// The step and the phase that run, and since when.
    step: (i64, i64),
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
                        if nested { SliceKind::Range(begun.api) } else { SliceKind::Astray(begun.api) };
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
            EventName::Mark | EventName::Oom | EventName::Lost => {
                self.instants.add(i64::MAX, row.seq, Instant { row: *row });
            }
            EventName::Alloc | EventName::Free | EventName::ExtAlloc | EventName::ExtFree => {
                // A block and its free are equally large: both are kept, or none.
                self.instants.add(row.delta_bytes.saturating_abs(), row.alloc_id, Instant { row: *row });
            }
            _ => {}
        }
        if row.event != EventName::Op && row.device != HOST {
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

    /// What is open at the end of the trace ends there.
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
