//! Writes the events of the file as JSON.

use std::io::Write;

use memtrace_trace::EventName;
use serde_json::{Value, json};

use super::super::downsample::DownsampledCurve;
use super::super::out::Out;
use super::collector::{PHASES, STEPS, Slice, SliceCollector, SliceKind, SliceName};
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::HOST;

/// The list of events in the file.
pub(super) struct EventList<'a> {
    pub(super) out: &'a mut Out,
    pub(super) events: u64,
}

impl EventList<'_> {
    pub(super) fn begin(&mut self, base_ns: i64) {
        // `Out` stores its first failure and returns it when it is closed, so write errors are ignored here
        // and below.
        write!(
            self.out,
            "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"version\":\"memtrace \
             {}\"}},\"baseTimeNanoseconds\":{base_ns},\"traceEvents\":[",
            env!("CARGO_PKG_VERSION")
        )
        .ok();
    }

    pub(super) fn add(&mut self, event: &Value) {
        let comma = if self.events > 0 { "," } else { "" };
        write!(self.out, "{comma}\n{event}").ok();
        self.events += 1;
    }

    pub(super) fn end(&mut self) {
        self.out.write_all(b"\n]}\n").ok();
    }
}

/// Writes one process of the file.
pub(super) struct ProcessWriter<'a> {
    pub(super) pid: i64,
    /// The time from the start of the first process to the start of this process.
    pub(super) offset_ns: i64,
    pub(super) symbols: &'a SymbolTable,
}

impl ProcessWriter<'_> {
    pub(super) fn write(&self, tracks: SliceCollector, trace: &TraceFile, list: &mut EventList<'_>) {
        let pid = self.pid;
        let words: Vec<&str> =
            trace.meta.argv.iter().map(|word| word.rsplit('/').next().unwrap_or(word)).collect();
        let name = format!("rank {} (pid {}): {}", trace.meta.rank, tracks.pid, words.join(" "));
        self.add_metadata(list, "process_name", 0, &name);
        list.add(&json!({
            "ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": { "sort_index": pid },
        }));
        self.add_metadata(list, "thread_name", STEPS, "steps");
        self.add_metadata(list, "thread_name", PHASES, "phases");
        let mut devices: Vec<(i32, DownsampledCurve)> = tracks.curves.into_iter().collect();
        devices.sort_by_key(|(ordinal, _)| *ordinal);
        for (ordinal, curve) in devices {
            let (name, [low, high]) = match ordinal {
                HOST => ("host memory".to_owned(), ["without a file", "resident"]),
                _ => (format!("GPU{ordinal} memory"), ["allocated", "reserved"]),
            };
            for point in curve.points() {
                list.add(&json!({ "ph": "C", "pid": pid, "name": name, "ts": self.us(point.at),
                    "args": { low: point.low, high: point.high } }));
            }
        }
        let mut slices: Vec<Slice> = tracks.slices.into_entries().collect();
        slices.sort_by_key(|slice| (slice.start_ns, -slice.end_ns));
        for (number, slice) in slices.iter().enumerate() {
            self.slice(list, slice, number);
        }
        let mut instants: Vec<Record> = tracks.instants.into_entries().collect();
        instants.sort_by_key(|row| row.seq);
        for row in &instants {
            self.instant(list, row);
        }
    }

    fn add_metadata(&self, list: &mut EventList<'_>, field: &str, tid: i32, name: &str) {
        list.add(&json!({ "ph": "M", "pid": self.pid, "tid": tid, "name": field, "args": { "name": name } }));
    }

    /// Returns the time in µs since the start of the first process.
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
            SliceKind::Band => event["cat"] = "band".into(),
            SliceKind::Range(api) => event["cat"] = self.text(api).into(),
            SliceKind::Op => {
                event["cat"] = "cpu_op".into();
                let (module, phase) = (self.text(slice.module), self.text(slice.phase));
                event["args"] = json!({ "module": module, "phase": phase, "bytes": slice.bytes });
            }
            SliceKind::OutOfOrder(api) => {
                let cat = self.text(api);
                for (ph, ts) in [("b", start), ("e", start + duration)] {
                    list.add(&json!({
                        "ph": ph, "pid": pid, "tid": tid, "name": name, "ts": ts, "cat": cat, "id": number,
                    }));
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
            // An allocation or a free: write the fields that `torch.profiler` writes, then the owner.
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
                    "dtype": self.text(row.dtype),
                    "shape": self.text(row.shape),
                });
            }
        }
        list.add(&event);
    }
}
