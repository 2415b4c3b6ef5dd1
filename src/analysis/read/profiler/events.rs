//! The events of a Chrome trace that concern memory: `[memory]` events, and the ranges that name their owners.
//!
//! The file is parsed as a stream. All other events are dropped at once.

use std::fmt;
use std::io::BufRead;

use memtrace_trace::columns::{MAX_BYTES, MAX_DEVICE, MAX_NUMBER};
use memtrace_trace::text::cut;
use rustc_hash::FxHashMap;
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::Value;

/// The value of `Device Type` for CUDA.
const CUDA: i64 = 1;
/// The longest name that is kept, in bytes.
const LONGEST_NAME: usize = 4096;

/// The content of a Chrome trace.
#[derive(Debug, Deserialize)]
pub(super) struct ChromeTrace {
    #[serde(rename = "traceEvents")]
    pub(super) events: Events,
    #[serde(rename = "deviceProperties", default)]
    pub(super) devices: Vec<DeviceProperties>,
    /// The time that counts as 0, in nanoseconds since the Unix epoch.
    #[serde(rename = "baseTimeNanoseconds", default)]
    pub(super) base_ns: i64,
}

/// A device of the traced machine.
#[derive(Debug, Deserialize)]
pub(super) struct DeviceProperties {
    #[serde(default)]
    pub(super) id: i32,
    #[serde(default)]
    pub(super) name: String,
    #[serde(rename = "totalGlobalMem", default)]
    pub(super) bytes: u64,
}

/// The kept events.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// The memory events of GPUs, by time.
    pub(super) memory: Vec<MemoryEvent>,
    /// The ranges, by thread and time; an outer range precedes the ranges in it.
    pub(super) ranges: Vec<Range>,
    names: Vec<Box<str>>,
    by_name: FxHashMap<Box<str>, u32>,
    /// The number of memory events with a wrong value, which are not kept.
    pub(super) wrong: u64,
}

/// An allocation, or a free if `bytes` is negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryEvent {
    pub(super) ts_ns: i64,
    pub(super) thread: i64,
    pub(super) device: i32,
    pub(super) addr: i64,
    pub(super) bytes: i64,
    /// The totals of the device after the event, in bytes.
    pub(super) allocated: i64,
    pub(super) reserved: i64,
}

/// A range of time of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) start_ns: i64,
    pub(super) end_ns: i64,
    pub(super) thread: i64,
    pub(super) kind: RangeKind,
    name: u32,
}

/// The meaning of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangeKind {
    /// An op, such as `aten::mm`.
    Op,
    /// A node of autograd, which runs in a backward pass.
    Backward,
    /// A call of a module.
    Module,
    /// The step of an optimizer.
    Optimizer,
    /// A step of the profiler's schedule.
    Step,
}

impl Events {
    /// Returns the name of a range.
    pub(super) fn name(&self, range: &Range) -> &str {
        &self.names[range.name as usize]
    }

    fn intern(&mut self, name: &str) -> u32 {
        if let Some(index) = self.by_name.get(name) {
            return *index;
        }
        let index = self.names.len() as u32;
        self.names.push(name.into());
        self.by_name.insert(name.into(), index);
        index
    }

    fn add(&mut self, event: &ChromeEvent) {
        let ts_ns = nanoseconds(&event.ts);
        let thread = event.tid.as_i64().unwrap_or(-1);
        if event.name == "[memory]" {
            if event.args.get("Device Type").and_then(Value::as_i64) == Some(CUDA) {
                match ts_ns.and_then(|ts_ns| memory_event(event, ts_ns, thread)) {
                    Some(found) => self.memory.push(found),
                    None => self.wrong += 1,
                }
            }
            return;
        }
        let Some(ts_ns) = ts_ns else { return };
        let Some(duration_ns) = nanoseconds(&event.dur).filter(|_| event.ph == "X") else { return };
        let Some((kind, name)) = kind_of(event) else { return };
        let name = self.intern(name);
        let end_ns = ts_ns.saturating_add(duration_ns.max(0));
        self.ranges.push(Range { start_ns: ts_ns, end_ns, thread, kind, name });
    }

    fn sort(&mut self) {
        self.memory.sort_by_key(|event| event.ts_ns);
        self.ranges.sort_by_key(|range| (range.thread, range.start_ns, std::cmp::Reverse(range.end_ns)));
    }
}

fn memory_event(event: &ChromeEvent, ts_ns: i64, thread: i64) -> Option<MemoryEvent> {
    let number = |key, most: u64| {
        let number = event.args.get(key)?.as_i64()?;
        (number.unsigned_abs() <= most).then_some(number)
    };
    let device = number("Device Id", MAX_DEVICE - 1)?;
    let total = |key| number(key, MAX_BYTES).map(|bytes| bytes.max(0));
    Some(MemoryEvent {
        ts_ns,
        thread,
        device: i32::try_from(device).ok().filter(|device| *device >= 0)?,
        addr: number("Addr", MAX_NUMBER)?,
        bytes: number("Bytes", MAX_BYTES)?,
        allocated: total("Total Allocated")?,
        reserved: total("Total Reserved")?,
    })
}

fn kind_of(event: &ChromeEvent) -> Option<(RangeKind, &str)> {
    let name = cut(event.name.as_str()?, LONGEST_NAME);
    match event.cat.as_str()? {
        "cpu_op" if name.starts_with("autograd::engine::evaluate_function") => {
            Some((RangeKind::Backward, name))
        }
        "cpu_op" if name.contains("::") => Some((RangeKind::Op, name)),
        "python_function" => Some((RangeKind::Module, name.strip_prefix("nn.Module: ")?)),
        "user_annotation" if name.starts_with("Optimizer.step#") => Some((RangeKind::Optimizer, name)),
        "user_annotation" if step_number(name).is_some() => Some((RangeKind::Step, name)),
        _ => None,
    }
}

/// Returns the number in the name of a step of the profiler's schedule.
pub(super) fn step_number(name: &str) -> Option<i64> {
    name.strip_prefix("ProfilerStep#")?.parse::<u32>().ok().map(i64::from)
}

/// Returns a time in nanoseconds. The file has microseconds, with three decimals, since `base_ns` or, if an older
/// version of PyTorch wrote it, since 1970.
fn nanoseconds(time_us: &Value) -> Option<i64> {
    let time_us = time_us.as_f64()?;
    // A product of the whole number would lose nanoseconds since 1970.
    let time_ns = || time_us.trunc() as i64 * 1000 + (time_us.fract() * 1000.0).round() as i64;
    (time_us.abs() <= MAX_NUMBER as f64 / 2000.0).then(time_ns)
}

/// An event. Its texts may be null.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ChromeEvent {
    ph: Value,
    name: Value,
    cat: Value,
    ts: Value,
    dur: Value,
    tid: Value,
    args: Value,
}

impl<'de> Deserialize<'de> for Events {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Events, D::Error> {
        deserializer.deserialize_seq(EventVisitor)
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = Events;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Events, A::Error> {
        let mut events = Events::default();
        while let Some(event) = list.next_element::<ChromeEvent>()? {
            events.add(&event);
        }
        if events.memory.is_empty() {
            return Err(A::Error::custom(match events.wrong {
                0 => {
                    "it has no memory events of a GPU; profile with profile_memory=True, and export_chrome_trace()"
                }
                _ => "each of its memory events of a GPU has an invalid value",
            }));
        }
        events.sort();
        Ok(events)
    }
}

/// Reads a Chrome trace.
pub(super) fn read(source: impl BufRead) -> Result<ChromeTrace, String> {
    serde_json::from_reader(source).map_err(|error| error.to_string())
}
