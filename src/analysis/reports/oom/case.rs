//! One request that ran out of memory: the cause, the verdict and the advice.

use std::fmt::Write as _;

use memtrace_trace::rounding::{SMALL_SIZE, segment_size};
use memtrace_trace::units::{GIB, Unit};
use memtrace_trace::{Api, EventName};
use serde_json::{Value, json};

use crate::options::Options;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::render::numbers::duration;
use crate::render::numbers::{counted, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::layout::Layout;
use crate::state::replay::Replay;
use crate::state::replay_trace::Replayed;
use crate::state::stacks::Stacks;

/// The lines of Python of the request that are shown.
const LINES: usize = 5;

/// An upper bound, in bytes, of what a CUDA context and the code and workspaces of libraries take without a
/// traced call. Unaccounted memory beyond it belongs to another process.
const CONTEXT: i64 = GIB;

/// Facts from the rows before the OOM.
#[derive(Default)]
pub(super) struct RowsBefore {
    pub(super) oom: Option<Record>,
    ooms: u64,
    /// Failed calls since the last successful one: those of this request.
    failed: u64,
    failed_of_oom: u64,
    /// By device, the bytes that a sample found in use and no row accounts for.
    foreign: Vec<(i32, i64)>,
}

impl RowsBefore {
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay, trace: &TraceFile) {
        let capacity = trace.meta.total_bytes(row.device);
        if row.device_free_bytes >= 0 && capacity > 0 {
            let totals = replay.find(row.device).map(|device| device.totals).unwrap_or_default();
            let foreign = (capacity - totals.reserved - totals.outside - row.device_free_bytes).max(0);
            self.foreign.retain(|(device, _)| *device != row.device);
            self.foreign.push((row.device, foreign));
        }
        match row.event {
            EventName::Oom => {
                self.ooms += 1;
                self.oom = Some(*row);
                self.failed_of_oom = std::mem::take(&mut self.failed);
            }
            EventName::SegmentAlloc | EventName::SegmentMap if row.status != 0 => self.failed += 1,
            EventName::Alloc | EventName::SegmentAlloc | EventName::SegmentMap => self.failed = 0,
            _ => {}
        }
    }
}

/// The bytes that the context of a simulated GPU takes, and those that a real card's may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextRange {
    here: i64,
    least: i64,
    most: i64,
}

impl ContextRange {
    /// The range that the simulated GPU of a trace told; `None` when it told none or one of no width.
    fn of(trace: &TraceFile) -> Option<ContextRange> {
        let bytes = |name: &str| trace.meta.phantom[name].as_i64();
        let range = ContextRange {
            here: bytes("context_bytes")?,
            least: bytes("context_low_bytes")?,
            most: bytes("context_high_bytes")?,
        };
        (range.least < range.most).then_some(range)
    }
}

/// The cause of an OOM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OomCause {
    /// The request is larger than the device minus the memory that must stay.
    TooBig,
    /// Enough memory is free, but in pieces that are too small.
    Fragmented,
    /// It would fit if torch used the device alone.
    Outside,
    /// The device had room, but a limit of torch forbade the allocation.
    Limited,
    /// `--phantom-fault` made it fail.
    Injected,
}

pub(super) struct OomCase<'a> {
    row: Record,
    trace: &'a TraceFile,
    why: OomCause,
    ooms: u64,
    /// The memory of the device, in bytes; 0 when unknown.
    capacity: i64,
    /// The context of a simulated GPU; `None` on a real one, and when the request for it set the context.
    context: Option<ContextRange>,
    allocated: i64,
    reserved: i64,
    /// Traced memory outside torch's allocator.
    outside: i64,
    /// Memory that no row accounts for.
    unknown: i64,
    /// Free memory on the device; `None` when the trace has no sample of it.
    device_free: Option<i64>,
    /// The size of the segment that the request needs.
    segment: i64,
    holes: Vec<i64>,
    largest_hole: i64,
    owner: String,
    /// The program's own lines of Python that made the request, innermost first.
    lines: Vec<String>,
}

impl<'a> OomCase<'a> {
    pub(super) fn new(
        trace: &'a TraceFile,
        replayed: &Replayed,
        layout: &Layout,
        row: &Record,
        seen: &RowsBefore,
    ) -> Self {
        let totals = replayed.replay.find(row.device).map(|device| device.totals).unwrap_or_default();
        let capacity = trace.meta.total_bytes(row.device);
        let request = row.rounded_bytes.max(row.requested_bytes);
        let segments = layout.segments(&replayed.replay, row.device);
        let small = request <= SMALL_SIZE as i64;
        let mut holes: Vec<i64> =
            segments.iter().filter(|s| s.is_small() == small).flat_map(|s| s.holes.clone()).collect();
        holes.sort_unstable_by_key(|hole| -hole);
        let left = (capacity - totals.reserved - totals.outside).max(0);
        // The sample is older than the request, so its free bytes are out of date; those of others are not.
        let foreign = seen.foreign.iter().find(|(device, _)| *device == row.device);
        let unknown = foreign.map_or(0, |(_, bytes)| *bytes.min(&left));
        let device_free = foreign.map(|_| left - unknown);
        let mut case = OomCase {
            row: *row,
            trace,
            why: OomCause::TooBig,
            ooms: seen.ooms,
            capacity,
            context: ContextRange::of(trace),
            allocated: totals.allocated,
            reserved: totals.reserved,
            outside: totals.outside,
            unknown,
            device_free,
            segment: segment_size(request.max(0).cast_unsigned()) as i64,
            largest_hole: holes.first().copied().unwrap_or(0),
            holes,
            owner: format!(
                "{} in {}, {}, step {}",
                replayed.symbols.or_dash(row.op),
                replayed.symbols.or_dash(row.module),
                replayed.symbols.or_dash(row.phase),
                step_or_dash(row.step)
            ),
            lines: Stacks::read(trace).lines(row.stack_id).into_iter().map(str::to_owned).collect(),
        };
        let is_injected = &*replayed.symbols.get(row.api) == Api::InjectedFault.as_str();
        case.why = if is_injected { OomCause::Injected } else { case.judge(seen.failed_of_oom) };
        case
    }

    /// Returns true if no other layout of the memory would help.
    pub(super) fn is_too_big(&self) -> bool {
        self.why == OomCause::TooBig
    }

    /// Bytes in the allocator's cache.
    fn cached(&self) -> i64 {
        (self.reserved - self.allocated).max(0)
    }

    /// Free memory on the device: as sampled, or else an upper bound, all memory without a known owner.
    fn room(&self) -> i64 {
        self.device_free.unwrap_or((self.capacity - self.reserved - self.outside).max(0))
    }

    /// [`OomCase::room`] as text.
    fn room_text(&self, units: Unit) -> String {
        let most = if self.device_free.is_none() { "at most " } else { "" };
        format!("{most}{}", units.show(self.room()))
    }

    fn request(&self) -> i64 {
        self.row.rounded_bytes.max(self.row.requested_bytes)
    }

    /// The bytes that lacked, when a real card may have them, because its context may be smaller.
    fn lacking_inside_range(&self) -> Option<i64> {
        let context = self.context?;
        // Without a sample the room counts the context as free.
        let unsampled = if self.device_free.is_none() { context.here } else { 0 };
        let lacking = self.segment - (self.room() - unsampled);
        (self.why != OomCause::Limited && lacking > 0 && lacking <= context.here - context.least)
            .then_some(lacking)
    }

    fn judge(&self, failed_calls: u64) -> OomCause {
        let request = self.request();
        if self.capacity > 0 && request > self.capacity {
            return OomCause::TooBig;
        }
        // No call failed and there was room: a limit of torch (`set_per_process_memory_fraction`).
        if failed_calls == 0 && self.capacity > 0 && self.room() >= self.segment {
            return OomCause::Limited;
        }
        if self.cached() + self.room() >= request && self.largest_hole < request {
            return OomCause::Fragmented;
        }
        let foreign = self.outside + (self.unknown - CONTEXT).max(0);
        if foreign > 0 && self.room() + self.cached() + foreign >= request {
            return OomCause::Outside;
        }
        OomCause::TooBig
    }

    fn verdict(&self, units: Unit) -> (&'static str, String, Vec<&'static str>) {
        let request = units.show(self.request());
        match self.why {
            OomCause::TooBig => (
                "too big",
                format!(
                    "{request} does not fit beside {} of live blocks, even without fragmentation",
                    units.show(self.allocated)
                ),
                vec![
                    "a smaller batch, or gradient accumulation",
                    "activation checkpointing, when activations hold the most (see below)",
                    "sharded or 8-bit optimizer state, when that holds the most",
                ],
            ),
            OomCause::Fragmented => (
                "fragmentation",
                format!(
                    "{} is free in torch's cache and {} on the device, but the largest piece has {}, and \
                     {request} is needed",
                    units.show(self.cached()),
                    self.room_text(units),
                    units.show(self.largest_hole)
                ),
                vec![
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                    "free the blocks that pin segments: memtrace frag names them",
                ],
            ),
            OomCause::Outside => (
                "outside torch",
                format!(
                    "{} of the device's memory is outside torch's allocator; without it, {request} would fit",
                    units.show(self.outside + self.unknown)
                ),
                vec![
                    "look for another process on this GPU (nvidia-smi)",
                    "libraries beside torch (NCCL, a second framework, plain cudaMalloc): memtrace peak --of \
                     used",
                ],
            ),
            OomCause::Injected => (
                "injected",
                format!("--phantom-fault made the request for {request} fail; the device had room"),
                vec!["nothing: the fault tests how the program recovers"],
            ),
            OomCause::Limited => (
                "a limit",
                format!(
                    "{} is free on the device, but a limit of torch forbids its use",
                    self.room_text(units)
                ),
                vec!["raise or remove the limit: torch.cuda.set_per_process_memory_fraction"],
            ),
        }
    }

    pub(super) fn print(&self, printer: &mut Printer, options: &Options) {
        let units = options.units;
        let mut first = format!(" at {}", duration(self.row.ts_ns));
        let _ = write!(first, ", rank {}, device {}: {}", self.trace.meta.rank, self.row.device, self.owner);
        printer.line([Cell::new("out of memory", Style::Alarm), first.into()]);
        for line in self.lines.iter().take(LINES) {
            printer.plain(format!("  {line}"));
        }
        if self.ooms > 1 {
            printer.plain(format!("the last of {}", counted(self.ooms, "OOM")));
        }
        printer.gap();
        let (name, because, tries) = self.verdict(units);
        printer.line([
            "verdict: ".into(),
            Cell::new(name, Style::Strong),
            format!(". {}.", upper_first(&because)).into(),
        ]);
        for advice in tries {
            printer.plain(format!("  try: {advice}"));
        }
        if let (Some(lacking), Some(context)) = (self.lacking_inside_range(), self.context) {
            printer.plain(format!(
                "inside the range: {} lacked, and the context of a real card may take {} to {} (here {}), so \
                 that the request may fit there",
                units.show(lacking),
                units.show(context.least),
                units.show(context.most),
                units.show(context.here)
            ));
        }
        printer.gap();
        let mut table = Table::new(&[("", Side::Right), ("", Side::Left)]);
        let mut line = |bytes: i64, what: String| {
            table.row([Cell::new(units.show(bytes).to_string(), Style::Strong), what.into()]);
        };
        line(self.request(), format!("requested; needs a segment of {}", units.show(self.segment)));
        line(self.allocated, "in blocks of torch's allocator".to_owned());
        let holes = self.holes.len();
        let largest = units.show(self.largest_hole);
        line(
            self.cached(),
            format!("free in its cache: {}, largest {largest}", counted(holes as u64, "usable piece")),
        );
        line(self.outside, "outside torch's allocator, in traced calls".to_owned());
        if self.unknown > 0 {
            line(self.unknown, "not traced: the CUDA context, other processes".to_owned());
        }
        match self.device_free {
            Some(free) => line(free, format!("free on the device, of {}", units.show(self.capacity))),
            None if self.capacity > 0 => {
                let most = format!(
                    "free on the device: {} of {}, not sampled",
                    self.room_text(units),
                    units.show(self.capacity)
                );
                table.row([Cell::new("unknown", Style::Strong), most.into()]);
            }
            None => {}
        }
        printer.table(&table);
    }

    pub(super) fn json(&self, replayed: &Replayed) -> Value {
        let (name, because, tries) = self.verdict(Unit::B);
        json!({
            "file": self.trace.path.display().to_string(),
            "rank": self.trace.meta.rank,
            "device": self.row.device,
            "seq": self.row.seq,
            "ts_ns": self.row.ts_ns,
            "ooms": self.ooms,
            "verdict": name,
            "injected": self.why == OomCause::Injected,
            "because": because,
            "try": tries,
            "inside_range": self.lacking_inside_range().is_some(),
            "context_range_bytes": self.context.map(|context| [context.least, context.most]),
            "requested_bytes": self.row.requested_bytes,
            "rounded_bytes": self.row.rounded_bytes,
            "segment_bytes": self.segment,
            "op": &*replayed.symbols.get(self.row.op),
            "module": &*replayed.symbols.get(self.row.module),
            "phase": &*replayed.symbols.get(self.row.phase),
            "step": self.row.step,
            "lines": self.lines,
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "cached_bytes": self.cached(),
            "largest_hole_bytes": self.largest_hole,
            "holes": self.holes.len(),
            "outside_bytes": self.outside,
            "unaccounted_bytes": self.unknown,
            "device_free_bytes": self.device_free,
            "capacity_bytes": self.capacity,
        })
    }
}

fn upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
