//! Replays rows into the state of memory over time.
//!
//! A [`Replay`] processes the rows of one process in order. It keeps the live blocks, the peaks, and the
//! totals of each device, both from the rows and as sums of the deltas. Its memory grows with the live
//! blocks, not with the file. It counts contradictions between rows in [`Problems`] and continues.
//! [`MemoryState`], which the encoder also uses, defines how an event changes the totals.
//!
//! `effects` applies the rows, and `blocks` returns the blocks of a moment.

mod blocks;
mod effects;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use memtrace_trace::memory::{Effect, MemoryState};
pub use memtrace_trace::memory::{MemoryKind, Metric, Totals};
use memtrace_trace::{Api, EventName};

pub use crate::options::Window;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};
pub use crate::state::block::{Block, Owner};
use crate::state::categories::{KnownCategories, Passes, Phases, WorkedSteps};
use crate::state::detail::{DetailedSteps, MARK_COLUMNS};
use crate::state::device::Devices;
pub use crate::state::device::{Device, Peak};
use crate::state::live_blocks::{FreedSlot, LiveBlocks};
use crate::state::module_layers::{ModuleClasses, RANGE_COLUMNS};
pub use crate::state::problems::{Counts, Problems};

/// The columns that every row needs, except the row of a free.
const ANY: Columns = Columns::of(&["seq", "step", "phase"]);
/// The columns that a row about memory needs.
const MEMORY: Columns = Columns::of(&[
    "seq",
    "status",
    "device",
    "alloc_id",
    "delta_bytes",
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
]);
/// The columns that a row needs if it allocates a block or may raise a peak.
const OWNED: Columns = Columns::of(&["ts_ns", "op", "module", "category"]);

/// The columns with the type and the shape of a tensor, as far as they are known.
const FORM: Columns = Columns::of(&["dtype", "shape"]);

/// The columns that a replay needs. A free row needs no owner, because the owner of its block is known
/// already. The row of an op or a range changes no memory. A report adds the other columns that it reads,
/// such as addresses or requested sizes.
pub const COLUMNS: Wanted = Wanted::all_events(ANY.and(MEMORY).and(OWNED))
    .except(EventName::Free, MEMORY)
    .except(EventName::Op, ANY)
    .except(EventName::Io, ANY)
    .except(EventName::RangeBegin, ANY.and(RANGE_COLUMNS))
    .except(EventName::RangeEnd, ANY)
    .except(EventName::Mark, ANY.and(MARK_COLUMNS))
    .except(EventName::Lost, ANY.and(Columns::of(&["requested_bytes"])))
    .plus(EventName::Alloc, FORM)
    .plus(EventName::Tag, FORM)
    .plus(EventName::Live, FORM)
    .plus(EventName::ExtAlloc, Columns::of(&["api"]))
    .plus(EventName::Oom, Columns::of(&["api", "rounded_bytes"]))
    .plus(EventName::Sample, Columns::of(&["name"]));

/// The device ordinal of pinned host memory, and of rows about the process or the machine. In traces of older
/// versions, CPU tensors have it, too.
pub const HOST: i32 = -1;
/// The device ordinal of CPU tensors.
pub const CPU: i32 = memtrace_trace::Event::CPU as i32;

/// Returns true if a device ordinal is a GPU's.
#[must_use]
pub const fn is_gpu(ordinal: i32) -> bool {
    ordinal >= 0
}

/// Returns the name of a device, as PyTorch writes it: `cuda:0`, `cpu`, or `cpu (pinned)`.
#[must_use]
pub fn device_name(ordinal: i32) -> String {
    match ordinal {
        CPU => "cpu".to_owned(),
        HOST => "cpu (pinned)".to_owned(),
        _ => format!("cuda:{ordinal}"),
    }
}

/// Returns the name of a device in a line of its own: `device 0`, `CPU tensors`, or `pinned host memory`.
#[must_use]
pub fn device_title(ordinal: i32) -> String {
    match ordinal {
        CPU => "CPU tensors".to_owned(),
        HOST => "pinned host memory".to_owned(),
        _ => format!("device {ordinal}"),
    }
}

/// The state of the memory of one process.
#[derive(Clone)]
pub struct Replay {
    /// The devices so far, and the live blocks by `alloc_id`.
    memory: MemoryState<LiveBlocks, Devices>,
    /// The block that the last row freed.
    freed: Option<FreedSlot>,
    /// The counts of rows, failed calls and lost events.
    pub counts: Counts,
    /// The detailed steps.
    pub detail: DetailedSteps,
    /// The contradictions between rows.
    pub problems: Problems,
    /// The `seq` of the last row.
    pub seq: i64,
    /// The highest time of a row so far, in ns since the start of the trace.
    pub ts_ns: i64,
    /// The current step; -1 before the first.
    pub step: i64,
    /// The highest step so far; -1 before the first.
    highest_step: i64,
    /// The highest step at the last OOM. `None` if there was no OOM, or if a later step has allocated since.
    oom_step: Option<i64>,
    /// The highest steps with a forward, with training and with an OOM.
    worked_steps: WorkedSteps,
    /// The first step so far.
    pub first_step: Option<i64>,
    /// The current phase.
    pub phase: Symbol,
    /// The `seq` and the step of the first row in a forward pass.
    pub first_forward: Option<(i64, i64)>,
    /// The backward passes so far.
    pub passes: Passes,
    /// The `seq` of the last allocation of a block.
    last_alloc: i64,
    /// The phases and ops that inference depends on.
    pub phases: Phases,
    /// The classes of the called modules.
    pub classes: ModuleClasses,
    /// The symbols of the rows.
    pub symbols: SymbolTable,
    /// The categories that an earlier reading inferred, for a trace without tags.
    pub known: KnownCategories,
    window: Window,
    /// True if the last row is in the window.
    inside: bool,
    /// True for the rows of a PyTorch snapshot, whose categories are inferred.
    is_snapshot: bool,
    /// The metric at whose peak the live blocks are kept.
    tracked: Metric,
    /// True if the totals of each row are compared with the sums of the deltas, which requires that every
    /// column is read.
    checks: bool,
    /// If `checks` is set: the end and the id of each live block, by device and address.
    places: BTreeMap<(i32, i64), (i64, i64)>,
    caching_allocator: Symbol,
    /// The calls that allocate managed memory.
    managed_calls: [Symbol; Api::MANAGED.len()],
}

/// Returns true if a row of this event has the current step and phase. The row of a free or a tag has the
/// step and phase of the allocation of its block or segment, and rows of the writer thread have neither.
pub(crate) fn has_current_step(event: EventName) -> bool {
    use EventName::{
        ExtFree, Free, FreeCompleted, HostFree, Live, Lost, Meta, Sample, SegmentFree, SegmentUnmap, Tag,
    };
    let is_free = matches!(event, Free | FreeCompleted | ExtFree | HostFree | SegmentFree | SegmentUnmap);
    !is_free && !matches!(event, Tag | Live | Sample | Lost | Meta)
}

impl Replay {
    /// Creates an empty state. Peaks are searched in `window`, and [`Replay::at_peak`] returns the blocks at
    /// the peak of `tracked`. `symbols` is the symbol table of the rows that [`Self::feed`] will get.
    #[must_use]
    pub fn new(symbols: &SymbolTable, window: Window, tracked: Metric) -> Replay {
        Replay {
            memory: MemoryState::default(),
            freed: None,
            counts: Counts::default(),
            detail: DetailedSteps::default(),
            problems: Problems::default(),
            seq: 0,
            ts_ns: 0,
            step: -1,
            highest_step: -1,
            oom_step: None,
            worked_steps: WorkedSteps::default(),
            first_step: None,
            phase: Symbol::NONE,
            first_forward: None,
            passes: Passes::default(),
            last_alloc: 0,
            phases: Phases::new(symbols),
            classes: ModuleClasses::default(),
            symbols: symbols.clone(),
            known: KnownCategories::default(),
            window,
            inside: window == Window::default(),
            is_snapshot: false,
            tracked,
            checks: false,
            places: BTreeMap::new(),
            caching_allocator: symbols.intern("caching_allocator"),
            managed_calls: Api::MANAGED.map(|call| symbols.intern(call.as_str())),
        }
    }

    /// Marks the categories of the rows as inferred if `is_snapshot` is true.
    #[must_use]
    pub(in crate::state) fn of_snapshot(self, is_snapshot: bool) -> Replay {
        Replay { is_snapshot, ..self }
    }

    /// Enables the comparison of each row's totals with the sums of the deltas. The reader must read every
    /// column.
    #[must_use]
    pub fn checking(self) -> Replay {
        Replay { checks: true, ..self }
    }

    /// Processes the next row.
    pub fn feed(&mut self, row: &Record) {
        // After removed parts, a jump of `seq` is no gap, because the reader has reported the missing parts
        // already.
        let jumps = row.follows_removed_parts && row.seq > self.seq;
        if self.seq + 1 != row.seq && self.counts.rows > 0 && !jumps {
            let last = self.seq;
            self.problems.gap(last, row.seq);
            self.problems.example(|| format!("seq {} follows {last}", row.seq));
        }
        self.freed = None;
        self.counts.feed(row);
        if row.event == EventName::Mark {
            self.detail.feed(row, self.highest_step, &self.symbols);
        }
        if row.step >= 0 {
            self.highest_step = self.highest_step.max(row.step);
            self.first_step.get_or_insert(row.step);
        }
        if has_current_step(row.event) {
            self.step = row.step;
            self.phase = row.phase;
            self.worked_steps.feed(&self.phases, row);
            self.passes.feed(row, row.phase == self.phases.backward);
            if row.phase == self.phases.forward && self.first_forward.is_none() {
                self.first_forward = Some((row.seq, row.step));
            }
        }
        // An op row may have the time 0, because its time column was not read. So keep the highest time.
        self.ts_ns = self.ts_ns.max(row.ts_ns);
        let inside = self.window.has(self.ts_ns, self.step);
        if inside && !self.inside {
            self.enter_window(row);
        }
        self.inside = inside;
        match MemoryKind::changed_by(row.event) {
            Some((_, Effect::Tag)) => self.tag(row),
            Some((_, Effect::Complete)) => self.totals(row),
            Some((kind @ (MemoryKind::Segment | MemoryKind::Mapped), _)) => {
                self.memory.count(&self.extent(row, kind));
                self.totals(row);
            }
            Some((kind, Effect::Alloc)) => self.alloc(row, kind),
            Some((kind, Effect::Free)) => self.free(row, kind),
            None => self.other(row),
        }
        self.seq = row.seq;
        self.problems.unfinished = row.event != EventName::End;
    }

    /// Processes a row that allocates and frees no memory.
    fn other(&mut self, row: &Record) {
        match row.event {
            EventName::Oom => {
                self.totals(row);
                // After an OOM that a simulated grant of memory resolved (`--past-oom`), the program
                // continued, so do not count it as the end of the run.
                if *self.symbols.get(row.api) != *Api::PastOom.as_str() {
                    self.oom_step = Some(self.highest_step);
                    if self.inside {
                        let wanted = row.allocated_bytes.saturating_add(row.rounded_bytes.max(0));
                        let device = self.memory.devices.device(row.device);
                        device.wanted_at_oom = device.wanted_at_oom.max(wanted);
                    }
                }
            }
            EventName::Sample => self.sample(row),
            EventName::Brief => self.brief(row),
            EventName::RangeBegin => self.classes.feed(row, &self.symbols),
            EventName::Lost => {
                let lost = row.requested_bytes.max(0).cast_unsigned();
                self.counts.lost = self.counts.lost.saturating_add(lost);
            }
            _ => {}
        }
    }

    /// Returns the devices so far, including the host, in order of ordinal.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.memory.devices.list
    }

    /// Returns the live blocks, by `alloc_id`.
    #[must_use]
    pub fn live(&self) -> &LiveBlocks {
        &self.memory.live
    }

    /// Returns the block that the last row freed, with its last owner.
    #[must_use]
    pub fn freed(&self) -> Option<&Block> {
        self.memory.live.removed(self.freed?)
    }

    /// Processes the text of the trace's end row, which is empty if the trace has none.
    pub(super) fn end(&mut self, text: &str) {
        self.worked_steps.end(text);
    }

    /// Returns the last step with work so far, or -1 before the first.
    ///
    /// A step ends with the optimizer. Memory that the program allocates after the last optimizer step
    /// (`loss.item()`, an evaluation) begins no further step. If no row shows such work, for example because
    /// no phase is known, returns the highest step.
    #[must_use]
    pub fn last_step(&self) -> i64 {
        self.worked_steps.last().unwrap_or(self.highest_step)
    }

    /// Returns true if there was an OOM and no later step has allocated memory on the GPU since the last one.
    /// The failed step is then incomplete in the trace. A trainer that only cleans up after an OOM begins no
    /// new step. A request that `--past-oom` granted is not an OOM here.
    #[must_use]
    pub fn ended_in_oom(&self) -> bool {
        self.oom_step.is_some()
    }

    /// Returns true if the rows come from a PyTorch snapshot.
    #[must_use]
    pub fn is_snapshot(&self) -> bool {
        self.is_snapshot
    }

    /// Returns true if the last row is in the window.
    #[must_use]
    pub fn in_window(&self) -> bool {
        self.inside
    }

    /// Returns the devices on which the process has a context but no memory: the ordinal, the bytes of the
    /// context, and the bytes of other processes.
    pub fn contexts(&self) -> impl Iterator<Item = (i32, i64, i64)> {
        self.memory.devices.contexts()
    }

    /// Returns the device `ordinal`, if a row named it.
    #[must_use]
    pub fn find(&self, ordinal: i32) -> Option<&Device> {
        self.memory.devices.list.iter().find(|device| device.ordinal == ordinal)
    }
}
