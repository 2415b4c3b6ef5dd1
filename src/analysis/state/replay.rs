//! Replays rows into the state of memory over time.
//!
//! A [`Replay`] takes the rows of one process in order. It keeps the totals of each device, as the rows have
//! them and as the sum of their deltas, the live blocks, and the peaks. Its memory grows with the live
//! blocks, not with the file. Contradictions between rows are counted in [`Problems`] and do not stop it. How
//! an event changes the totals is defined by [`MemoryState`], which the encoder uses too.

use memtrace_trace::EventName;
use memtrace_trace::columns::MAX_BYTES;
use memtrace_trace::memory::{Effect, Extent, MemoryState};
pub use memtrace_trace::memory::{MemoryKind, Metric, Totals};
use memtrace_trace::sample::Sample;

pub use crate::options::Window;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Death;
pub use crate::state::block::{Block, Owner};
use crate::state::categories::{self, FlowCategories, InferenceState, Passes, Phases, is_from_outside};
use crate::state::device::Devices;
pub use crate::state::device::{Device, Moment};
use crate::state::live_blocks::{FreedSlot, LiveBlocks};
pub use crate::state::problems::{Counts, Problems};

/// The columns needed of every row.
const ANY: Columns = Columns::of(&["seq", "step", "phase"]);
/// The columns needed of a row about memory.
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
/// The columns needed of a row that allocates a block or may raise a peak.
const OWNED: Columns = Columns::of(&["ts_ns", "op", "module", "category"]);

/// The columns that a replay needs. The owner in a free row is that of its block, which is known already; the
/// row of an op or a range changes no memory. A report adds the other columns that it reads, such as
/// addresses or requested sizes.
pub const COLUMNS: Wanted = Wanted::all_events(ANY.and(MEMORY).and(OWNED))
    .except(EventName::Free, MEMORY)
    .except(EventName::Op, ANY)
    .except(EventName::Io, ANY)
    .except(EventName::RangeBegin, ANY)
    .except(EventName::RangeEnd, ANY)
    .except(EventName::Mark, ANY)
    .except(EventName::Lost, ANY.and(Columns::of(&["requested_bytes"])))
    .plus(EventName::ExtAlloc, Columns::of(&["api"]))
    .plus(EventName::Sample, Columns::of(&["name"]));

/// The calls that allocate managed memory, which moves between host and device.
pub const MANAGED_CALLS: [&str; 2] = ["cudaMallocManaged", "cuMemAllocManaged"];

/// The device ordinal of rows about the host.
pub const HOST: i32 = -1;

/// The state of the memory of one process.
pub struct Replay {
    /// The devices so far, and the live blocks by `alloc_id`.
    memory: MemoryState<LiveBlocks, Devices>,
    /// The block that the last row freed.
    freed: Option<FreedSlot>,
    /// Counts of rows, failed calls and lost events.
    pub counts: Counts,
    /// Contradictions between rows.
    pub problems: Problems,
    /// The `seq` of the last row.
    pub seq: i64,
    /// The time of the last row, in ns since the start of the trace.
    pub ts_ns: i64,
    /// The current step; -1 before the first.
    pub step: i64,
    /// The highest step so far, and the highest with a row of a forward, a backward or an optimizer; -1 before the
    /// first.
    highest_step: (i64, i64),
    /// The first step so far.
    pub first_step: Option<i64>,
    /// The current phase.
    pub phase: Symbol,
    /// The `seq` and step of the first row in a forward pass.
    pub first_forward: Option<(i64, i64)>,
    /// The backward passes so far.
    pub passes: Passes,
    /// The phases that inference depends on.
    pub phases: Phases,
    /// The symbols of the rows.
    pub symbols: SymbolTable,
    /// Categories from the flow of data between ops, for a trace with io records and without tags.
    pub flow: FlowCategories,
    window: Window,
    /// True if the last row is in the window.
    inside: bool,
    /// The metric whose peak keeps its blocks.
    tracked: Metric,
    /// True if the totals of each row are compared with the sums; that needs every column.
    checks: bool,
    caching_allocator: Symbol,
    /// The calls that allocate managed memory.
    managed_calls: [Symbol; MANAGED_CALLS.len()],
}

/// Returns true if a row of this event has the current step and phase. The row of a free or a tag has those
/// of its block's allocation, and rows of the writer thread have none.
pub(crate) fn has_current_step(event: EventName) -> bool {
    use EventName::{ExtFree, Free, FreeCompleted, HostFree, Live, Lost, Meta, Sample, Tag};
    !matches!(event, Free | FreeCompleted | ExtFree | HostFree | Tag | Live | Sample | Lost | Meta)
}

impl Replay {
    /// An empty state. Peaks are searched in `window`; [`Replay::at_peak`] has the blocks at the peak of
    /// `tracked`. `symbols` is the table of the rows to come.
    #[must_use]
    pub fn new(symbols: &SymbolTable, window: Window, tracked: Metric) -> Replay {
        Replay {
            memory: MemoryState::default(),
            freed: None,
            counts: Counts::default(),
            problems: Problems::default(),
            seq: 0,
            ts_ns: 0,
            step: -1,
            highest_step: (-1, -1),
            first_step: None,
            phase: Symbol::NONE,
            first_forward: None,
            passes: Passes::default(),
            phases: Phases {
                forward: symbols.intern("forward"),
                backward: symbols.intern("backward"),
                optimizer: symbols.intern("optimizer"),
            },
            symbols: symbols.clone(),
            flow: FlowCategories::default(),
            window,
            inside: window == Window::default(),
            tracked,
            checks: false,
            caching_allocator: symbols.intern("caching_allocator"),
            managed_calls: MANAGED_CALLS.map(|call| symbols.intern(call)),
        }
    }

    /// Enables the check of the totals of every row against the sum of the deltas. Needs a reading of every
    /// column.
    #[must_use]
    pub fn checking(self) -> Replay {
        Replay { checks: true, ..self }
    }

    /// Takes the next row.
    pub fn feed(&mut self, row: &Record) {
        if self.seq + 1 != row.seq && self.counts.rows > 0 {
            self.problems.seq_gaps += 1;
            let last = self.seq;
            self.problems.example(|| format!("seq {} follows {last}", row.seq));
        }
        self.freed = None;
        self.counts.rows += 1;
        self.counts.events[row.event as usize] += 1;
        self.counts.failed += u64::from(row.status != 0);
        if row.step >= 0 {
            self.highest_step.0 = self.highest_step.0.max(row.step);
            self.first_step.get_or_insert(row.step);
        }
        if has_current_step(row.event) {
            self.step = row.step;
            self.phase = row.phase;
            if row.step > self.highest_step.1 && self.phases.is_work(row.phase) {
                self.highest_step.1 = row.step;
            }
            self.passes.feed(row, row.phase == self.phases.backward);
            if row.phase == self.phases.forward && self.first_forward.is_none() {
                self.first_forward = Some((row.seq, row.step));
            }
        }
        // The time of an op row may not be parsed, so it is 0.
        self.ts_ns = self.ts_ns.max(row.ts_ns);
        let inside = self.window.has(self.ts_ns, self.step);
        if inside && !self.inside {
            self.enter_window(row);
        }
        self.inside = inside;
        match MemoryKind::of(row.event) {
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

    /// Takes a row that changes no memory.
    fn other(&mut self, row: &Record) {
        match row.event {
            EventName::Oom => self.totals(row),
            EventName::Sample => self.sample(row),
            EventName::Lost => {
                let lost = row.requested_bytes.max(0).cast_unsigned();
                self.counts.lost = self.counts.lost.saturating_add(lost);
            }
            _ => {}
        }
    }

    /// The devices so far, with the host, in order of ordinal.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.memory.devices.list
    }

    /// The live blocks, by `alloc_id`.
    #[must_use]
    pub fn live(&self) -> &LiveBlocks {
        &self.memory.live
    }

    /// The block that the last row freed, with its last owner.
    #[must_use]
    pub fn freed(&self) -> Option<&Block> {
        self.memory.live.removed(self.freed?)
    }

    /// The last step so far; -1 before the first. Only the work of a step makes it count: a step ends with the
    /// optimizer, and what the program allocates after the last one (`loss.item()`) begins no other step. Without any
    /// such work, as when the program numbers its steps and no phase is known, each number counts.
    #[must_use]
    pub fn last_step(&self) -> i64 {
        let (highest, worked) = self.highest_step;
        if worked >= 0 { worked } else { highest }
    }

    /// Returns true if the last row is in the window.
    #[must_use]
    pub fn in_window(&self) -> bool {
        self.inside
    }

    /// The device `ordinal`, if a row named it.
    #[must_use]
    pub fn find(&self, ordinal: i32) -> Option<&Device> {
        self.memory.devices.list.iter().find(|device| device.ordinal == ordinal)
    }

    /// The totals at the start of a window are the first candidates for its peaks.
    fn enter_window(&mut self, row: &Record) {
        let (seq, ts_ns) = (self.seq, row.ts_ns);
        for device in &mut self.memory.devices.list {
            for metric in Metric::ALL {
                device.raise(metric, seq, ts_ns, Owner::of(row), self.tracked);
            }
        }
    }

    /// Takes the totals of a row, and updates the peaks.
    fn totals(&mut self, row: &Record) {
        let (tracked, inside) = (self.tracked, self.inside);
        let device = self.memory.devices.device(row.device);
        let mut totals = device.summed;
        totals.adopt(row.allocated_bytes, row.active_bytes, row.reserved_bytes);
        device.totals = totals;
        if inside {
            for metric in Metric::ALL {
                if totals.get(metric) > device.peaks[metric as usize].bytes {
                    device.raise(metric, row.seq, row.ts_ns, Owner::of(row), tracked);
                }
            }
        }
        if self.checks {
            self.compare(row);
        }
    }

    /// Takes a sample of a device.
    fn sample(&mut self, row: &Record) {
        let sample = Sample::parse(&self.symbols.get(row.name));
        let owner = Owner { step: self.step, phase: self.phase, ..Moment::default().owner };
        if let Some(device) = self.memory.devices.sample(row.device, sample, row.seq)
            && self.inside
        {
            device.raise(Metric::Used, row.seq, self.ts_ns, owner, self.tracked);
        }
    }

    /// Compares the totals of a row with the sum of the deltas.
    fn compare(&mut self, row: &Record) {
        let device = self.memory.devices.device(row.device);
        let (totals, summed) = (device.totals, device.summed);
        let drift = (totals.allocated - summed.allocated, totals.reserved - summed.reserved);
        // A wrong total stays wrong: only the row at which the difference changes is a problem. In the
        // opening rows of a rotated part the totals are ahead of the sums.
        let changed = drift != std::mem::replace(&mut device.drift, drift);
        if changed && drift != (0, 0) && row.event != EventName::Live {
            self.problems.totals += 1;
            self.problems.example(|| {
                format!(
                    "seq {}, device {}: the deltas sum to {} allocated and {} reserved, the row says {} and {}",
                    row.seq,
                    row.device,
                    summed.allocated,
                    summed.reserved,
                    totals.allocated,
                    totals.reserved
                )
            });
        }
    }

    /// The memory that a row is about; the bytes of a free are negative.
    fn extent(&self, row: &Record, kind: MemoryKind) -> Extent {
        // With caching off, a block is its own segment.
        let in_segment = row.api == self.caching_allocator;
        Extent { device: row.device, kind, in_segment, bytes: row.delta_bytes }
    }

    fn alloc(&mut self, row: &Record, kind: MemoryKind) {
        if row.alloc_id != 0 {
            let block = Block {
                kind,
                device: row.device,
                id: row.alloc_id,
                born_ns: row.ts_ns,
                bytes: row.delta_bytes,
                // A request may exceed what memory has; a block does not, so that sums stay within 64 bits.
                requested: row.requested_bytes.min(MAX_BYTES.cast_signed()),
                rounded: row.rounded_bytes.min(MAX_BYTES.cast_signed()),
                addr: row.addr,
                stream: row.stream,
                pool: row.pool,
                stack: row.stack_id,
                owner: Owner::of(row),
                then: None,
                pass: self.passes.begun,
                died: None,
                managed: kind == MemoryKind::External && self.managed_calls.contains(&row.api),
                inferred: false,
                in_window: self.inside && row.event != EventName::Live && self.is_of(kind, row.device),
            };
            if self.memory.alloc(&self.extent(row, kind), block.id, block) {
                self.problems.double_allocs += 1;
                self.problems
                    .example(|| format!("seq {}: alloc_id {} was live already", row.seq, row.alloc_id));
            } else {
                let device = self.memory.devices.device(row.device);
                if block.managed {
                    device.managed = device.managed.wrapping_add(block.bytes);
                    device.count_untraced();
                }
                device.live_blocks += 1;
                device.total_allocated =
                    device.total_allocated.wrapping_add(if block.in_window { block.bytes } else { 0 });
            }
        }
        self.totals(row);
    }

    fn free(&mut self, row: &Record, kind: MemoryKind) {
        if row.alloc_id != 0 {
            let (extent, death) = (
                self.extent(row, kind),
                Death { step: self.step, phase: self.phase, pass: self.passes.begun },
            );
            self.freed = self.memory.free(row.alloc_id, death, |_| extent.freed());
            if let Some(freed) = self.freed {
                self.account_freed(row, freed);
            } else {
                self.problems.unmatched_frees += 1;
                self.problems.example(|| {
                    format!("seq {}: frees alloc_id {}, which is not live", row.seq, row.alloc_id)
                });
            }
        }
        self.totals(row);
    }

    /// Accounts for a freed block.
    fn account_freed(&mut self, row: &Record, freed: FreedSlot) {
        let Some(block) = self.memory.live.removed(freed) else { return };
        let (id, device, bytes) = (block.id, block.device, block.bytes);
        if self.phase == self.phases.backward && is_from_outside(block, &self.phases) {
            self.passes.add_activation(block);
        }
        let is_unowned = block.in_window && block.owner.is_nobody();
        let managed = if block.managed { bytes } else { 0 };
        if bytes != -row.delta_bytes {
            self.problems.wrong_sizes += 1;
            self.problems.example(|| {
                format!(
                    "seq {}: frees {} bytes of alloc_id {}, which has {bytes}",
                    row.seq, -row.delta_bytes, row.alloc_id
                )
            });
        }
        let tracked = self.tracked;
        let device = self.memory.devices.device(device);
        device.live_blocks = device.live_blocks.saturating_sub(1);
        if managed != 0 {
            device.managed = device.managed.wrapping_sub(managed);
            device.count_untraced();
        }
        if id <= device.peak(tracked).seq
            && let Some(block) = self.memory.live.removed(freed).copied()
        {
            self.memory.devices.device(block.device).gone.push(block);
        }
        if is_unowned && let Some(block) = self.memory.live.removed(freed).copied() {
            self.count_unowned(block);
        }
    }

    /// Counts a freed block without an owner, with and without inference: only the end of the trace shows
    /// whether it has tags.
    #[cold]
    fn count_unowned(&mut self, mut block: Block) {
        self.infer_categories(std::slice::from_mut(&mut block));
        let unowned = &mut self.memory.devices.device(block.device).unowned;
        unowned.all = unowned.all.wrapping_add(block.bytes);
        if !block.owner.is_nobody() {
            unowned.inferred = unowned.inferred.wrapping_add(block.bytes);
        }
    }

    /// Of all blocks allocated on a device in the window: the bytes of those without an owner at their free
    /// or at the end, and the bytes of all.
    #[must_use]
    pub fn unowned_and_total(&self, ordinal: i32) -> (i64, i64) {
        let Some(device) = self.find(ordinal) else { return (0, 0) };
        let blocks = self.memory.live.values().filter(|block| block.device == ordinal && block.in_window);
        let live = self.with_inferred(blocks.filter(|block| block.owner.is_nobody()).copied().collect());
        let live = live.iter().filter(|block| block.owner.is_nobody()).map(|block| block.bytes);
        let inferred = if self.infers() { device.unowned.inferred } else { 0 };
        (live.fold(device.unowned.all.wrapping_sub(inferred), i64::wrapping_add), device.total_allocated)
    }

    /// Takes a `tag` row. Tags come in pairs: the row with negative bytes of the old owner, then the row of
    /// the new owner.
    fn tag(&mut self, row: &Record) {
        self.memory.count(&self.extent(row, MemoryKind::Block));
        if row.delta_bytes <= 0 {
            return;
        }
        let tracked = self.tracked;
        let peak = self.find(row.device).map_or(0, |device| device.peak(tracked).seq);
        let Some(block) = self.memory.live.get_mut(row.alloc_id) else { return };
        if block.id <= peak && block.then.is_none_or(|(_, at)| at != peak) {
            block.then = Some((block.owner, peak));
        }
        block.owner = Owner::of(row);
    }

    /// Returns true if categories are inferred: the trace has no tags so far, and a forward or backward pass or a flow of
    /// data.
    #[must_use]
    pub fn infers(&self) -> bool {
        let by_phase = self.first_forward.is_some() || self.passes.first_activation.is_some();
        self.counts.of(EventName::Tag) == 0 && (by_phase || !self.flow.is_empty())
    }

    /// `blocks` with inferred categories, where the trace infers any.
    fn with_inferred(&self, mut blocks: Vec<Block>) -> Vec<Block> {
        if self.infers() {
            self.infer_categories(&mut blocks);
        }
        blocks
    }

    /// The state that the rules of inference depend on.
    fn inference_state(&self) -> InferenceState {
        let Replay { phases, first_forward, step, phase, .. } = *self;
        InferenceState { phases, first_forward, step, phase, passes: self.passes }
    }

    /// Sets the inferred categories of `blocks`.
    fn infer_categories(&self, blocks: &mut [Block]) {
        if self.flow.is_empty() {
            categories::infer(blocks, &self.inference_state());
        } else {
            self.flow.apply(blocks);
        }
    }

    /// Returns true if blocks of `kind` count among those of the device `ordinal`.
    fn is_of(&self, kind: MemoryKind, ordinal: i32) -> bool {
        match kind {
            MemoryKind::Block => true,
            MemoryKind::External => self.tracked == Metric::Used,
            MemoryKind::Host => ordinal == HOST,
            // Segments have no block.
            MemoryKind::Segment | MemoryKind::Mapped => false,
        }
    }

    /// The live blocks of a device: those of torch's allocator, or pinned memory on the host. With `as_of`,
    /// without inferred categories.
    #[must_use]
    pub fn live_on(&self, ordinal: i32, as_of: bool) -> Vec<Block> {
        let here = |block: &&Block| block.device == ordinal && block.kind != MemoryKind::External;
        let blocks = self.memory.live.values().filter(here).copied().collect();
        if as_of { blocks } else { self.with_inferred(blocks) }
    }

    /// The blocks that were live on a device at its peak of the tracked metric. With `as_of`, each has its
    /// owner of that moment; otherwise its last owner and an inferred category.
    #[must_use]
    pub fn at_peak(&self, ordinal: i32, as_of: bool) -> Vec<Block> {
        let Some(device) = self.find(ordinal) else { return Vec::new() };
        let peak = device.peak(self.tracked).seq;
        let blocks = self
            .memory
            .live
            .values()
            .filter(|block| block.device == ordinal && block.id <= peak)
            .chain(&device.gone)
            .filter(|block| self.is_of(block.kind, ordinal))
            .map(|block| match block.then {
                Some((owner, at)) if as_of && at == peak => Block { owner, ..*block },
                _ => *block,
            })
            .collect();
        if as_of { blocks } else { self.with_inferred(blocks) }
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
