//! `chrome`: trace-event JSON, for Perfetto and chrome://tracing.
//!
//! A process each has the counters of its GPUs, its steps and phases, and its threads with their ranges
//! and ops as slices and the instants `[memory]` that `torch.profiler` writes for allocations. Times are µs
//! since the first process started.

use std::io::Write;

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::downsample::{DownsampledCurve, Largest, Point};
use super::export::{Export, Job, Leaves, MAX_EVENTS, max_events};
use super::out::Out;
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::count;
use crate::state::replay::{HOST, Metric, Replay};
use crate::state::replay_trace::replay_trace;

/// See the module.
pub(super) struct Chrome;

const COLUMNS: Columns = Columns::of(&[
    "ts_ns",
    "pid",
    "tid",
    "device",
    "api",
    "addr",
    "op",
    "module",
    "phase",
    "category",
    "step",
    "latency_ns",
    "delta_bytes",
    "rounded_bytes",
    "name",
]);

/// A counter shows no more turns than a screen has columns, several times over.
const STRETCHES: usize = 16_384;

/// Of threads that end no range that they begin, the innermost of this many are known.
const MOST_OPEN: usize = 4096;

/// Tracks that are no thread: no process has a thread with an id that low.
const STEPS: i32 = 1;
const PHASES: i32 = 2;

impl Export for Chrome {
    fn name(&self) -> &'static str {
        "chrome"
    }

    fn about(&self) -> &'static str {
        "Trace-event JSON for Perfetto and chrome://tracing: counters, ranges and ops, [memory] instants"
    }

    fn flags(&self) -> &'static [Flag] {
        &[MAX_EVENTS]
    }

    fn leaves(&self, _: &Options) -> Leaves {
        Leaves::OneFile(".trace.json")
    }

    fn open_with(&self) -> &'static str {
        "https://ui.perfetto.dev, Open trace file"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let most = max_events(job.options)?;
        let base_ns = job.input.traces.iter().map(|trace| trace.meta.start_unix_ns).min().unwrap_or(0);
        let mut out = Out::create(job.place)?;
        let mut list = EventList { out: &mut out, events: 0 };
        list.begin(base_ns);
        let mut dropped = 0;
        for (number, trace) in job.input.traces.iter().enumerate() {
            let mut tracks = SliceCollector::new(most);
            let replayed = replay_trace(
                trace,
                COLUMNS,
                job.options,
                Metric::Allocated,
                flow_categories(trace, job.options)?,
                |row, replay| {
                    if replay.in_window()
                        && job.options.device.is_none_or(|only| only == row.device || row.device == HOST)
                    {
                        tracks.feed(row, replay);
                    }
                },
            )?;
            job.learn(trace, &replayed);
            tracks.close(replayed.replay.ts_ns);
            dropped += tracks.slices.dropped + tracks.instants.dropped;
            let process = ProcessWriter {
                // Two hosts may have given one pid twice.
                pid: number as i64,
                offset_ns: trace.meta.start_unix_ns.saturating_sub(base_ns),
                symbols: &replayed.symbols,
            };
            process.write(tracks, trace, &mut list);
        }
        list.end();
        let events = list.events;
        if dropped > 0 {
            job.footer.notes.push(format!(
                "{} of the shortest slices and smallest allocations were left out; --max-events 0 takes all",
                count(dropped)
            ));
        }
        job.done(out, format!("{} events", count(events)))
    }
}

/// A range that has not ended.
struct OpenSlice {
    name: Symbol,
    api: Symbol,
    start_ns: i64,
}

/// A slice of a track.
struct Slice {
    tid: i32,
    name: SliceName,
    start_ns: i64,
    end_ns: i64,
    kind: InstantKind,
    module: Symbol,
    phase: Symbol,
    bytes: i64,
}

enum SliceName {
    Text(Symbol),
    Step(i64),
}

#[derive(Clone, Copy)]
enum InstantKind {
    /// A range that the program or a module's call opened: the call that told of it.
    Range(Symbol),
    /// One that did not end in the order of its thread's.
    Astray(Symbol),
    Op,
    Band,
}

/// What is shown as a moment.
struct Instant {
    row: Record,
}

/// What is kept of one process.
struct SliceCollector {
    pid: i32,
    curves: FxHashMap<i32, DownsampledCurve>,
    slices: Largest<Slice>,
    instants: Largest<Instant>,
    open: FxHashMap<i32, Vec<OpenSlice>>,
    /// The step and the phase that run, and since when.
    step: (i64, i64),
    phase: (Symbol, i64),
}

impl SliceCollector {
    fn new(most: usize) -> SliceCollector {
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

    fn feed(&mut self, row: &Record, replay: &Replay) {
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
                        if nested { InstantKind::Range(begun.api) } else { InstantKind::Astray(begun.api) };
                    self.slice(row, SliceName::Text(begun.name), begun.start_ns, kind);
                }
            }
            EventName::Op => {
                self.slice(
                    row,
                    SliceName::Text(row.op),
                    row.ts_ns.saturating_sub(row.latency_ns),
                    InstantKind::Op,
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

    fn slice(&mut self, row: &Record, name: SliceName, start_ns: i64, kind: InstantKind) {
        let end_ns = row.ts_ns.max(start_ns);
        let (tid, module, phase, bytes) = (row.tid, row.module, row.phase, row.delta_bytes);
        let slice = Slice { tid, name, start_ns, end_ns, kind, module, phase, bytes };
        self.slices.add(end_ns.saturating_sub(start_ns), row.seq, slice);
    }

    fn band(&mut self, tid: i32, name: SliceName, start_ns: i64, end_ns: i64) {
        let (module, phase, kind, bytes) = (Symbol::NONE, Symbol::NONE, InstantKind::Band, 0);
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
    fn close(&mut self, now_ns: i64) {
        self.end_step(now_ns);
        self.end_phase(now_ns);
        for (tid, open) in std::mem::take(&mut self.open) {
            for begun in open {
                let row = Record { tid, ts_ns: now_ns, ..Record::default() };
                self.slice(&row, SliceName::Text(begun.name), begun.start_ns, InstantKind::Range(begun.api));
            }
        }
    }
}

/// The events of the file, one behind the other.
struct EventList<'a> {
    out: &'a mut Out,
    events: u64,
}

impl EventList<'_> {
    fn begin(&mut self, base_ns: i64) {
        // `Out` keeps its failure to itself, here and below.
        write!(
            self.out,
            "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"version\":\"memtrace {}\"}},\"baseTimeNanoseconds\":{base_ns},\"traceEvents\":[",
            env!("CARGO_PKG_VERSION")
        )
        .ok();
    }

    fn add(&mut self, event: &Value) {
        let comma = if self.events > 0 { "," } else { "" };
        write!(self.out, "{comma}\n{event}").ok();
        self.events += 1;
    }

    fn end(&mut self) {
        self.out.write_all(b"\n]}\n").ok();
    }
}

/// One process of the file.
struct ProcessWriter<'a> {
    pid: i64,
    /// From the first process's start to this one's.
    offset_ns: i64,
    symbols: &'a SymbolTable,
}

impl ProcessWriter<'_> {
    fn write(&self, tracks: SliceCollector, trace: &TraceFile, list: &mut EventList<'_>) {
        let pid = self.pid;
        let words: Vec<&str> =
            trace.meta.argv.iter().map(|word| word.rsplit('/').next().unwrap_or(word)).collect();
        let name = format!("rank {} (pid {}): {}", trace.meta.rank, tracks.pid, words.join(" "));
        self.named(list, "process_name", 0, &name);
        list.add(&json!({ "ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": { "sort_index": pid } }));
        self.named(list, "thread_name", STEPS, "steps");
        self.named(list, "thread_name", PHASES, "phases");
        let mut devices: Vec<(i32, DownsampledCurve)> = tracks.curves.into_iter().collect();
        devices.sort_by_key(|(ordinal, _)| *ordinal);
        for (ordinal, curve) in devices {
            let name = format!("GPU{ordinal} memory");
            for point in curve.points() {
                list.add(&json!({ "ph": "C", "pid": pid, "name": name, "ts": self.us(point.at),
                    "args": { "allocated": point.low, "reserved": point.high } }));
            }
        }
        let mut slices: Vec<Slice> = tracks.slices.into_entries().collect();
        slices.sort_by_key(|slice| (slice.start_ns, -slice.end_ns));
        for (number, slice) in slices.iter().enumerate() {
            self.slice(list, slice, number);
        }
        let mut instants: Vec<Instant> = tracks.instants.into_entries().collect();
        instants.sort_by_key(|instant| instant.row.seq);
        for instant in &instants {
            self.instant(list, &instant.row);
        }
    }

    fn named(&self, list: &mut EventList<'_>, what: &str, tid: i32, name: &str) {
        list.add(&json!({ "ph": "M", "pid": self.pid, "tid": tid, "name": what, "args": { "name": name } }));
    }

    /// µs since the first process started.
    fn us(&self, ts_ns: i64) -> f64 {
        self.offset_ns.saturating_add(ts_ns) as f64 / 1e3
    }

    fn text(&self, symbol: Symbol) -> String {
        self.symbols.get(symbol).to_string()
    }

    fn slice(&self, list: &mut EventList<'_>, slice: &Slice, number: usize) {
        let name = match slice.name {
            SliceName::Text(symbol) => self.text(symbol),
            SliceName::Step(step) => format!("step {step}"),
        };
        let start = self.us(slice.start_ns);
        let duration = slice.end_ns.saturating_sub(slice.start_ns) as f64 / 1e3;
        let (pid, tid) = (self.pid, slice.tid);
        let mut event =
            json!({ "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": duration });
        match slice.kind {
            InstantKind::Band => event["cat"] = "band".into(),
            InstantKind::Range(api) => event["cat"] = self.text(api).into(),
            InstantKind::Op => {
                event["cat"] = "cpu_op".into();
                event["args"] = json!({ "module": self.text(slice.module), "phase": self.text(slice.phase), "bytes": slice.bytes });
            }
            InstantKind::Astray(api) => {
                let cat = self.text(api);
                for (ph, ts) in [("b", start), ("e", start + duration)] {
                    list.add(&json!({ "ph": ph, "pid": pid, "tid": tid, "name": name, "ts": ts, "cat": cat, "id": number }));
                }
                return;
            }
        }
        list.add(&event);
    }

    fn instant(&self, list: &mut EventList<'_>, row: &Record) {
        let (pid, tid, ts) = (self.pid, row.tid, self.us(row.ts_ns));
        let mut event = json!({ "ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": ts });
        match row.event {
            EventName::Mark => {
                event["name"] = self.text(row.name).into();
                event["cat"] = "mark".into();
            }
            EventName::Lost => {
                event["name"] = format!("events lost: {}", self.text(row.name)).into();
                event["cat"] = "lost".into();
                event["s"] = "p".into();
            }
            EventName::Oom => {
                event["name"] = "out of memory".into();
                event["cat"] = "oom".into();
                event["s"] = "p".into();
                event["args"] = json!({
                    "Bytes": row.rounded_bytes,
                    "Device Id": row.device,
                    "Total Allocated": row.allocated_bytes,
                    "Total Reserved": row.reserved_bytes,
                    "op": self.text(row.op),
                    "module": self.text(row.module),
                    "phase": self.text(row.phase),
                });
            }
            // As `torch.profiler` has it, and then whose it is.
            _ => {
                event["name"] = "[memory]".into();
                event["cat"] = "cpu_instant_event".into();
                event["args"] = json!({
                    "Addr": row.addr,
                    "Bytes": row.delta_bytes,
                    "Device Id": row.device,
                    "Device Type": 1,
                    "Total Allocated": row.allocated_bytes,
                    "Total Reserved": row.reserved_bytes,
                    "op": self.text(row.op),
                    "module": self.text(row.module),
                    "phase": self.text(row.phase),
                    "category": row.category.as_str(),
                });
            }
        }
        list.add(&event);
    }
}
