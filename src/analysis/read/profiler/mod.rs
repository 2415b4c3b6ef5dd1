//! Reads the Chrome trace of `torch.profiler` as a trace.
//!
//! With `profile_memory=True`, it has an event for each allocation and free of a block, with the device's
//! totals of allocated and reserved memory after it. Segments are not in it: rows of segments without an
//! address make up the changes of the reserved total.

mod events;
#[cfg(test)]
mod tests;

use std::io::{self, BufReader, Cursor, Read};
use std::sync::{Arc, Mutex, PoisonError};

use memtrace_trace::SCHEMA_VERSION;
use memtrace_trace::columns::MAX_BYTES;
use memtrace_trace::csv::RowWriter;
use memtrace_trace::end_row::{Anomalies, EndText, Ending};
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::text::{NONE, TORCH_ALLOCATOR};
use memtrace_trace::units::Unit;
use memtrace_trace::{Api, EventName, Row};
use rustc_hash::FxHashMap;

use super::LIVE;
use super::packed_file::FileKey;
use events::{ChromeTrace, Events, MemoryEvent, Range, RangeKind};

/// The maximum number of levels of a module's path.
const DEEPEST_MODULE: usize = 32;
/// The maximum number of open ranges of a thread. Ranges inside them are ignored.
const MOST_OPEN: usize = 1024;

/// Returns true if a file begins like a Chrome trace, which is a JSON object.
pub(super) fn is_chrome_trace(start: &[u8]) -> bool {
    start.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

/// The rows of a Chrome trace, in CSV.
#[derive(Clone)]
pub(super) struct Rows(Arc<Vec<u8>>);

impl AsRef<[u8]> for Rows {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// The rows of the file that was read last. A command reads its file several times.
static KEPT: Mutex<Option<(FileKey, Rows)>> = Mutex::new(None);

/// Returns the rows of a Chrome trace. `key` is the identity of the file.
///
/// # Errors
/// When the file cannot be read or has no memory events.
pub(super) fn rows(key: FileKey, source: impl Read) -> io::Result<Cursor<Rows>> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, rows)) = kept.as_ref().filter(|(known, _)| *known == key) {
        return Ok(Cursor::new(rows.clone()));
    }
    *kept = None;
    let rows = Rows(Arc::new(rows_of(BufReader::with_capacity(1 << 20, source))?));
    *kept = Some((key, rows.clone()));
    Ok(Cursor::new(rows))
}

fn rows_of(source: impl io::BufRead) -> io::Result<Vec<u8>> {
    let trace = events::read(source).map_err(|why| {
        let what = format!("not a Chrome trace of torch.profiler that memtrace can read: {why}");
        io::Error::new(io::ErrorKind::InvalidData, what)
    })?;
    let mut csv = Vec::new();
    write(&trace, &mut csv)?;
    Ok(csv)
}

/// The owner of a memory event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RangeOwner {
    op: Option<String>,
    module: String,
    phase: &'static str,
}

/// Returns the owner of each memory event, which the ranges that are open on its thread name.
fn owners(events: &Events) -> Vec<RangeOwner> {
    let mut owners = vec![RangeOwner::default(); events.memory.len()];
    let mut order: Vec<usize> = (0..owners.len()).collect();
    order.sort_by_key(|at| (events.memory[*at].thread, events.memory[*at].ts_ns));
    let mut ranges = events.ranges.iter().peekable();
    let mut open: Vec<&Range> = Vec::new();
    for at in order {
        let MemoryEvent { thread, ts_ns, .. } = events.memory[at];
        let has_begun = |range: &&Range| (range.thread, range.start_ns) <= (thread, ts_ns);
        while let Some(range) = ranges.next_if(|range| has_begun(range)) {
            close(&mut open, range.thread, range.start_ns + 1);
            if open.len() < MOST_OPEN {
                open.push(range);
            }
        }
        close(&mut open, thread, ts_ns);
        owners[at] = owner(events, &open);
    }
    owners
}

/// Removes the innermost ranges that are on another thread or have ended before `ts_ns`.
fn close(open: &mut Vec<&Range>, thread: i64, ts_ns: i64) {
    while open.pop_if(|range| range.thread != thread || range.end_ns < ts_ns).is_some() {}
}

fn owner(events: &Events, open: &[&Range]) -> RangeOwner {
    let of = |kind| open.iter().filter(move |range| range.kind == kind);
    let modules: Vec<&str> = of(RangeKind::Module).map(|range| events.name(range)).collect();
    let has = |kind| of(kind).next().is_some();
    let phase = match () {
        () if has(RangeKind::Optimizer) => "optimizer",
        () if has(RangeKind::Backward) => "backward",
        () if !modules.is_empty() => "forward",
        () => NONE,
    };
    RangeOwner {
        op: of(RangeKind::Op).next_back().map(|range| events.name(range).to_owned()),
        module: modules[..modules.len().min(DEEPEST_MODULE)].join("."),
        phase,
    }
}

/// Returns the time at which each step begins, with the number of the step, and the number of steps. The
/// profiler's own steps are used, with their numbers. Without them, each step ends with the optimizer's step.
fn step_starts(events: &Events) -> (Vec<(i64, i64)>, usize) {
    let of = |kind| events.ranges.iter().filter(move |range| range.kind == kind);
    let numbered = |range: &Range| Some((range.start_ns, events::step_number(events.name(range))?));
    let mut starts: Vec<(i64, i64)> = of(RangeKind::Step).filter_map(numbered).collect();
    starts.sort_unstable();
    let mut steps = starts.len();
    if starts.is_empty() {
        let mut times: Vec<i64> = of(RangeKind::Optimizer).map(|range| range.end_ns).collect();
        steps = times.len();
        times.extend(events.memory.first().map(|event| event.ts_ns).filter(|_| steps > 0));
        times.sort_unstable();
        starts = times.into_iter().zip(0..).collect();
    }
    (starts, steps)
}

/// The state of a device.
#[derive(Debug, Default)]
struct DeviceState {
    /// The `alloc_id` and the bytes of each live block, by address.
    blocks: FxHashMap<i64, (i64, i64)>,
    /// The `alloc_id` and the bytes of the rows that make up the reserved memory.
    segments: Vec<(i64, i64)>,
    /// The sums of the rows so far, in bytes.
    allocated: i64,
    reserved: i64,
}

/// Writes the rows.
fn write(trace: &ChromeTrace, sink: &mut Vec<u8>) -> io::Result<()> {
    let events = &trace.events;
    let mut rows = RowMaker { writer: RowWriter::new(sink), seq: 0, anomalies: Anomalies::default() };
    let earlier = memory_at_start(events);
    let meta = meta(trace, &earlier).to_json().map_err(io::Error::other)?;
    rows.add(Row { event: EventName::Meta, api: "memtrace", name: &meta, ..Row::default() })?;
    let start_ns = events.memory.first().map_or(0, |event| event.ts_ns);
    let mut devices: FxHashMap<i32, DeviceState> = FxHashMap::default();
    for Earlier { device, allocated, reserved, blocks } in earlier {
        let state = devices.entry(device).or_default();
        rows.reserve(state, device, reserved, &Row { name: LIVE, ..Row::default() })?;
        for (addr, bytes) in blocks {
            state.allocated += bytes;
            let row = Row { device, addr, name: LIVE, ..rows.totals(state) };
            state.blocks.insert(addr, (rows.seq + 1, bytes));
            rows.add(Row { event: EventName::Live, alloc_id: -1, delta_bytes: bytes, ..row })?;
        }
        let rest = allocated - state.allocated;
        if rest > 0 {
            state.allocated += rest;
            let row = Row { device, name: LIVE, ..rows.totals(state) };
            rows.add(Row { event: EventName::Live, alloc_id: -1, delta_bytes: rest, ..row })?;
        }
    }
    let (starts, steps) = step_starts(events);
    for (event, owner) in events.memory.iter().zip(owners(events)) {
        let state = devices.entry(event.device).or_default();
        let base = Row {
            ts_ns: event.ts_ns - start_ns,
            step: match starts.partition_point(|(start_ns, _)| *start_ns <= event.ts_ns) {
                0 => -1,
                begun => starts[begun - 1].1,
            },
            op: owner.op.as_deref().unwrap_or(NONE),
            module: if owner.module.is_empty() { NONE } else { &owner.module },
            phase: owner.phase,
            ..Row::default()
        };
        rows.event(state, event, &base)?;
    }
    let Anomalies { unmatched_frees, missed_frees, corrections, gaps } = rows.anomalies;
    let missing = unmatched_frees + missed_frees + corrections + gaps + events.wrong;
    if missing > 0 {
        let name = "the memory events contradict their totals";
        let requested_bytes = missing as i64;
        rows.add(Row { event: EventName::Lost, api: "memtrace", requested_bytes, name, ..Row::default() })?;
    }
    let steps = format!("steps={steps}");
    let end =
        EndText { ending: Ending::Exit, more: &steps, lost: 0, anomalies: rows.anomalies, formulas: None };
    let end = end.to_string();
    rows.add(Row { event: EventName::End, api: "memtrace", name: &end, ..Row::default() })?;
    rows.writer.flush()
}

struct RowMaker<'a> {
    writer: RowWriter<&'a mut Vec<u8>>,
    seq: i64,
    anomalies: Anomalies,
}

impl RowMaker<'_> {
    /// Adds a row with the next `seq`. A negative `alloc_id` becomes this `seq`.
    fn add(&mut self, row: Row<'_>) -> io::Result<()> {
        self.seq += 1;
        let alloc_id = if row.alloc_id < 0 { self.seq } else { row.alloc_id };
        self.writer.write(&Row { seq: self.seq, alloc_id, source: TORCH_ALLOCATOR, ..row })
    }

    /// Returns a row of the allocator with the totals of a device.
    fn totals(&self, state: &DeviceState) -> Row<'static> {
        Row {
            api: Api::CachingAllocator.as_str(),
            allocated_bytes: state.allocated,
            active_bytes: state.allocated,
            reserved_bytes: state.reserved,
            ..Row::default()
        }
    }

    fn event(&mut self, state: &mut DeviceState, event: &MemoryEvent, base: &Row<'_>) -> io::Result<()> {
        let &MemoryEvent { device, addr, bytes, reserved, .. } = event;
        self.reserve(state, device, reserved, base)?;
        let found = state.blocks.remove(&addr);
        if let Some((alloc_id, size)) = found {
            self.anomalies.missed_frees += u64::from(bytes > 0);
            state.allocated -= size;
            let row = Row { device, addr, alloc_id, delta_bytes: -size, ..self.totals(state) };
            self.add(Row { event: EventName::Free, rounded_bytes: size, ..owned(row, base) })?;
        } else if bytes < 0 {
            self.anomalies.unmatched_frees += 1;
        }
        if bytes > 0 {
            state.allocated = (state.allocated + bytes).min(MAX_BYTES as i64);
            state.blocks.insert(addr, (self.seq + 1, bytes));
            let row = Row { device, addr, alloc_id: -1, delta_bytes: bytes, ..self.totals(state) };
            self.add(Row { event: EventName::Alloc, rounded_bytes: bytes, ..owned(row, base) })?;
        }
        self.anomalies.gaps += u64::from(state.allocated != event.allocated);
        Ok(())
    }

    /// Adds rows until the reserved memory of a device has `wanted` bytes.
    fn reserve(
        &mut self,
        state: &mut DeviceState,
        device: i32,
        wanted: i64,
        base: &Row<'_>,
    ) -> io::Result<()> {
        while state.reserved > wanted {
            let Some((alloc_id, bytes)) = state.segments.pop() else { break };
            state.reserved -= bytes;
            let row = Row { device, alloc_id, delta_bytes: -bytes, ..self.totals(state) };
            self.add(Row { event: EventName::SegmentFree, api: "cudaFree", ..owned(row, base) })?;
        }
        let bytes = wanted - state.reserved;
        if bytes > 0 {
            state.reserved = wanted;
            state.segments.push((self.seq + 1, bytes));
            let row = Row { device, alloc_id: -1, delta_bytes: bytes, ..self.totals(state) };
            let row = Row { event: EventName::SegmentAlloc, api: "cudaMalloc", ..owned(row, base) };
            self.add(Row { rounded_bytes: bytes, ..row })?;
        }
        Ok(())
    }
}

/// Returns `row` with the time, the step, the owner and the name of `base`.
fn owned<'a>(row: Row<'a>, base: &Row<'a>) -> Row<'a> {
    let Row { ts_ns, step, op, module, phase, name, .. } = *base;
    Row { ts_ns, step, op, module, phase, name, ..row }
}

/// The memory of a device when the profile begins.
struct Earlier {
    device: i32,
    allocated: i64,
    reserved: i64,
    /// The address and the bytes of the blocks that the profile frees.
    blocks: Vec<(i64, i64)>,
}

fn memory_at_start(events: &Events) -> Vec<Earlier> {
    let mut all: Vec<Earlier> = Vec::new();
    let mut seen: FxHashMap<(i32, i64), ()> = FxHashMap::default();
    for &MemoryEvent { device, addr, bytes, allocated, reserved, .. } in &events.memory {
        if !all.iter().any(|earlier| earlier.device == device) {
            let allocated = (allocated - bytes).clamp(0, MAX_BYTES as i64);
            all.push(Earlier { device, allocated, reserved, blocks: Vec::new() });
        }
        if seen.insert((device, addr), ()).is_none()
            && bytes < 0
            && let Some(earlier) = all.iter_mut().find(|earlier| earlier.device == device)
        {
            earlier.blocks.push((addr, -bytes));
        }
    }
    all
}

fn meta(trace: &ChromeTrace, earlier: &[Earlier]) -> Meta {
    let start_ns = trace.events.memory.first().map_or(0, |event| event.ts_ns);
    let note = |text: &str| format!("torch.profiler: {text}");
    let mut degraded = vec![note(
        "ops, modules, phases and steps come from its ranges (modules need with_stack=True); segments, requested sizes, categories \
         and memory outside PyTorch are not in it; memtrace run records them",
    )];
    let allocated: i64 = earlier.iter().fold(0, |sum, earlier| sum.saturating_add(earlier.allocated));
    if allocated > 0 {
        let allocated = Unit::Auto.show(allocated);
        degraded.push(note(&format!(
            "{allocated} were already allocated when the profile began; their owner is unknown"
        )));
    }
    Meta {
        schema: SCHEMA_VERSION.to_owned(),
        memtrace: env!("CARGO_PKG_VERSION").to_owned(),
        start_unix_ns: trace.base_ns.saturating_add(start_ns),
        run_id: "profiler".to_owned(),
        world_size: 1,
        part: 1,
        degraded,
        devices: trace
            .devices
            .iter()
            .map(|device| Device {
                ordinal: device.id,
                name: device.name.clone(),
                total_bytes: device.bytes.min(MAX_BYTES) as i64,
            })
            .collect(),
        ..Meta::default()
    }
}
