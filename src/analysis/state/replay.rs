//! Rows into live memory over time: the one place that knows how state evolves.
//!
//! A [`Replay`] is fed the rows of one process in order. It keeps the totals of each device, both as
//! the rows tell them and as the sum of their deltas, the blocks that are live, and the peaks; all in
//! memory that grows with what is live, never with the file. What the rows contradict is counted in
//! [`Problems`] and never stops it.

use memtrace_trace::memory::{DeviceTotals, Effect, Extent, MemoryState};
pub use memtrace_trace::memory::{MemoryKind, Metric, Totals};
use memtrace_trace::{Category, EventName};

use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::categories::{self, Death, FlowCategories, Phases};
use crate::state::live_blocks::{FreedSlot, LiveBlocks};

/// What a row must say of itself, whatever its event.
const ANY: Columns = Columns::of(&["seq", "step", "phase"]);
/// What a row about memory says.
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
/// What opens a block, and what may raise a peak.
const OWNED: Columns = Columns::of(&["ts_ns", "op", "module", "category"]);

/// The columns that a replay needs. A free repeats the owner of its block, which is known; an op or a
/// range changes nothing. What else a report reads of a block, its address or what was asked for, the
/// report adds.
pub const COLUMNS: Wanted = Wanted::all_events(ANY.and(MEMORY).and(OWNED))
    .except(EventName::Free, MEMORY)
    .except(EventName::Op, ANY)
    .except(EventName::Io, ANY)
    .except(EventName::RangeBegin, ANY)
    .except(EventName::RangeEnd, ANY)
    .except(EventName::Mark, ANY)
    .except(EventName::Lost, ANY.and(Columns::of(&["requested_bytes"])));

/// The device of rows that are about the host.
pub const HOST: i32 = -1;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The innermost op.
    pub op: Symbol,
    /// The module.
    pub module: Symbol,
    /// The phase.
    pub phase: Symbol,
    /// What it is for.
    pub category: Category,
    /// The training step of the allocation; -1 before the first.
    pub step: i64,
}

impl Owner {
    fn of(row: &Record) -> Owner {
        Owner { op: row.op, module: row.module, phase: row.phase, category: row.category, step: row.step }
    }

    /// Does nothing say whose it is: no op, no module, no category?
    #[must_use]
    pub fn is_nobody(&self) -> bool {
        self.op == Symbol::NONE && self.module == Symbol::NONE && self.category == Category::None
    }
}

/// A live block, or one that was.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Its kind: memory of segments has no block.
    pub kind: MemoryKind,
    /// Its device.
    pub device: i32,
    /// The `seq` of its allocation.
    pub id: i64,
    /// When it was allocated, ns since the trace's start.
    pub born_ns: i64,
    /// What was really given, in bytes.
    pub bytes: i64,
    /// What was asked for, in bytes; -1 when unknown.
    pub requested: i64,
    /// The request under the allocator's rule, in bytes.
    pub rounded: i64,
    /// Its address; 0 unless the reading asks for the column, as the next two.
    pub addr: i64,
    /// The stream that it was allocated on.
    pub stream: i64,
    /// The allocator's private pool that it lies in; 0 for the default.
    pub pool: i64,
    /// The stack of its allocation; 0 for none, or unless the reading asks for the column.
    pub stack: i64,
    /// Whose it is, as far as the rows so far tell.
    pub owner: Owner,
    /// Whose it was at the peak numbered `then.1`, when a later row changed it.
    then: Option<(Owner, i64)>,
    /// How it ended; `None` while it lives.
    pub died: Option<Death>,
    /// Its category was inferred.
    pub inferred: bool,
    /// It was handed out in the window: it counts in [`Device::given`].
    given: bool,
}

/// A moment at which a total was highest.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The total, in bytes.
    pub bytes: i64,
    /// The `seq` of the row.
    pub seq: i64,
    /// ns since the trace's start.
    pub ts_ns: i64,
    /// Who raised it.
    pub owner: Owner,
}

impl Default for Moment {
    fn default() -> Self {
        let owner = Owner {
            op: Symbol::NONE,
            module: Symbol::NONE,
            phase: Symbol::NONE,
            category: Category::None,
            step: -1,
        };
        Moment { bytes: 0, seq: 0, ts_ns: 0, owner }
    }
}

/// One device.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// Its CUDA ordinal, or [`HOST`].
    pub ordinal: i32,
    /// As the rows tell it.
    pub totals: Totals,
    /// The sums of the deltas. Those of torch's memory are exact only when every column is read.
    pub summed: Totals,
    /// The peak of each metric, in the order of [`Metric::ALL`].
    pub peaks: [Moment; 4],
    /// How many blocks are live.
    pub live_blocks: u64,
    /// The bytes of all blocks that were handed out in the window, live or gone.
    given: i64,
    /// Of those of them that are gone, the bytes that nobody owned at the end.
    unowned: Unowned,
    /// Blocks that were live at the peak of the tracked metric and are gone now. No more bytes than
    /// the peak had, so this stays as small as what is live.
    gone: Vec<Block>,
    /// How far the totals are from the sums: allocated, reserved.
    drift: (i64, i64),
}

/// The devices of a process.
#[derive(Default)]
struct Devices {
    /// By ordinal.
    list: Vec<Device>,
    /// The index of the device of the last row.
    latest: usize,
}

impl Devices {
    /// The device of that ordinal, new or known.
    #[inline]
    fn device(&mut self, ordinal: i32) -> &mut Device {
        // Most rows are about the device of the row before.
        if self.list.get(self.latest).is_none_or(|device| device.ordinal != ordinal) {
            self.latest = self.place(ordinal);
        }
        &mut self.list[self.latest]
    }

    /// The index of that device.
    #[cold]
    fn place(&mut self, ordinal: i32) -> usize {
        match self.list.binary_search_by_key(&ordinal, |device| device.ordinal) {
            Ok(at) => at,
            Err(at) => {
                self.list.insert(at, Device { ordinal, ..Device::default() });
                at
            }
        }
    }
}

impl DeviceTotals for Devices {
    #[inline]
    fn totals_mut(&mut self, device: i32) -> &mut Totals {
        &mut self.device(device).summed
    }
}

/// Bytes that no row says the owner of.
#[derive(Clone, Copy, Debug, Default)]
struct Unowned {
    all: i64,
    /// Of these, what inference has a category for.
    inferred: i64,
}

impl Device {
    /// The peak of `metric`.
    #[must_use]
    pub fn peak(&self, metric: Metric) -> &Moment {
        &self.peaks[metric as usize]
    }
}

/// How many rows of each event there were, and what failed.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Rows, the meta row too.
    pub rows: u64,
    /// Per event, in the order of [`EventName::ALL`].
    events: [u64; EventName::ALL.len()],
    /// Calls that failed.
    pub failed: u64,
    /// Events that the traced process dropped.
    pub lost: u64,
}

impl Counts {
    /// The rows of `event`.
    #[must_use]
    pub fn of(&self, event: EventName) -> u64 {
        self.events[event as usize]
    }
}

/// Where the rows contradict one another.
#[derive(Clone, Debug, Default)]
pub struct Problems {
    /// Places where `seq` does not follow.
    pub seq_gaps: u64,
    /// Rows whose totals differ from the sum of the deltas by another amount than the row before.
    pub totals: u64,
    /// Frees of a block that was not live.
    pub unmatched_frees: u64,
    /// Allocations under an id that was live already.
    pub double_allocs: u64,
    /// Frees of another size than the block's.
    pub wrong_sizes: u64,
    /// The last row is not `end`.
    pub unfinished: bool,
    /// The first few, in words.
    pub examples: Vec<String>,
}

/// How many examples are kept.
const MOST_EXAMPLES: usize = 8;

impl Problems {
    fn example(&mut self, text: impl FnOnce() -> String) {
        if self.examples.len() < MOST_EXAMPLES {
            self.examples.push(text());
        }
    }
}

/// The part of a trace that peaks are looked for in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// From, ns since the trace's start.
    pub from_ns: i64,
    /// Up to and with, ns.
    pub to_ns: i64,
    /// The first step.
    pub from_step: i64,
    /// The last step.
    pub to_step: i64,
}

impl Default for Window {
    fn default() -> Self {
        Window { from_ns: i64::MIN, to_ns: i64::MAX, from_step: i64::MIN, to_step: i64::MAX }
    }
}

impl Window {
    fn has(&self, ts_ns: i64, step: i64) -> bool {
        (self.from_ns..=self.to_ns).contains(&ts_ns) && (self.from_step..=self.to_step).contains(&step)
    }
}

/// The state of one process's memory; see the module.
pub struct Replay {
    /// The devices seen so far, and the blocks that are live, by `alloc_id`.
    memory: MemoryState<LiveBlocks, Devices>,
    /// What the row fed last gave back.
    freed: Option<FreedSlot>,
    /// What was counted.
    pub counts: Counts,
    /// What does not fit.
    pub problems: Problems,
    /// The `seq` of the row fed last.
    pub seq: i64,
    /// Its time.
    pub ts_ns: i64,
    /// The step that runs; -1 before the first.
    pub step: i64,
    /// The highest step seen; -1 before the first.
    pub last_step: i64,
    /// The lowest step seen that is not before the first.
    pub first_step: Option<i64>,
    /// The phase that runs.
    pub phase: Symbol,
    /// The `seq` and the step of the first row in a forward pass.
    pub first_forward: Option<(i64, i64)>,
    /// The phases that inference asks for.
    pub phases: Phases,
    /// The texts of the rows' symbols.
    pub symbols: SymbolTable,
    /// What the flow of data between ops says that blocks are for, by `alloc_id`: of a trace that has io
    /// records and no tags.
    pub flow: FlowCategories,
    window: Window,
    inside: bool,
    tracked: Metric,
    /// Whether every row's totals are held against the sums; that needs every column.
    checks: bool,
    caching_allocator: Symbol,
}

/// Does a row of this event say which step and phase the program is in? That of a free has its block's, which
/// may be long ago; the writer thread's own rows have none.
pub(crate) fn tells_step(event: EventName) -> bool {
    use EventName::{ExtFree, Free, FreeCompleted, HostFree, Live, Lost, Meta, Sample, Tag};
    !matches!(event, Free | FreeCompleted | ExtFree | HostFree | Tag | Live | Sample | Lost | Meta)
}

impl Replay {
    /// Nothing yet. Peaks are looked for in `window`; what was live at a device's peak of `tracked` can
    /// be asked for at the end. `symbols` is the table of the rows to come.
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
            last_step: -1,
            first_step: None,
            phase: Symbol::NONE,
            first_forward: None,
            phases: Phases { forward: symbols.intern("forward"), backward: symbols.intern("backward") },
            symbols: symbols.clone(),
            flow: FlowCategories::default(),
            window,
            inside: window == Window::default(),
            tracked,
            checks: false,
            caching_allocator: symbols.intern("caching_allocator"),
        }
    }

    /// Holds the totals of every row against the sum of the deltas: for a reading of every column.
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
            self.last_step = self.last_step.max(row.step);
            self.first_step.get_or_insert(row.step);
        }
        if tells_step(row.event) {
            self.step = row.step;
            self.phase = row.phase;
            if row.phase == self.phases.forward && self.first_forward.is_none() {
                self.first_forward = Some((row.seq, row.step));
            }
        }
        // An op's row need not have its time parsed.
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

    /// A row that changes no memory.
    fn other(&mut self, row: &Record) {
        match row.event {
            EventName::Oom => self.totals(row),
            EventName::Lost => {
                let lost = row.requested_bytes.max(0).cast_unsigned();
                self.counts.lost = self.counts.lost.saturating_add(lost);
            }
            _ => {}
        }
    }

    /// The devices seen so far, the host too, by ordinal.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.memory.devices.list
    }

    /// The blocks that are live, by `alloc_id`.
    #[must_use]
    pub fn live(&self) -> &LiveBlocks {
        &self.memory.live
    }

    /// The block that the row fed last gave back, with its last owner.
    #[must_use]
    pub fn freed(&self) -> Option<&Block> {
        self.memory.live.removed(self.freed?)
    }

    /// Is the row fed last in the window?
    #[must_use]
    pub fn in_window(&self) -> bool {
        self.inside
    }

    /// The device of that ordinal, if a row named it.
    #[must_use]
    pub fn find(&self, ordinal: i32) -> Option<&Device> {
        self.memory.devices.list.iter().find(|device| device.ordinal == ordinal)
    }

    /// The level at which a window opens is its first candidate for the peak.
    fn enter_window(&mut self, row: &Record) {
        let (seq, ts_ns) = (self.seq, row.ts_ns);
        for device in &mut self.memory.devices.list {
            for metric in Metric::ALL {
                let bytes = device.totals.get(metric);
                if bytes > device.peaks[metric as usize].bytes {
                    let owner = Owner::of(row);
                    device.peaks[metric as usize] = Moment { bytes, seq, ts_ns, owner };
                    if metric == self.tracked {
                        device.gone.clear();
                    }
                }
            }
        }
    }

    /// Takes the totals of a row of its device, and looks whether they are the highest so far.
    fn totals(&mut self, row: &Record) {
        let (tracked, inside) = (self.tracked, self.inside);
        let device = self.memory.devices.device(row.device);
        let mut totals = device.summed;
        totals.adopt(row.allocated_bytes, row.active_bytes, row.reserved_bytes);
        device.totals = totals;
        if inside {
            for metric in Metric::ALL {
                let bytes = totals.get(metric);
                let peak = &mut device.peaks[metric as usize];
                if bytes > peak.bytes {
                    *peak = Moment { bytes, seq: row.seq, ts_ns: row.ts_ns, owner: Owner::of(row) };
                    if metric == tracked {
                        device.gone.clear();
                    }
                }
            }
        }
        if self.checks {
            self.compare(row);
        }
    }

    /// Compares the totals of a row with the deltas so far.
    fn compare(&mut self, row: &Record) {
        let device = self.memory.devices.device(row.device);
        let (totals, summed) = (device.totals, device.summed);
        let drift = (totals.allocated - summed.allocated, totals.reserved - summed.reserved);
        // A total that is off stays off: only the row at which that begins or changes is a problem.
        // While a rotated part lists what was live, its totals run ahead of the sums.
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

    /// The amount of memory that a row is about; a free has a negative one.
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
                requested: row.requested_bytes,
                rounded: row.rounded_bytes,
                addr: row.addr,
                stream: row.stream,
                pool: row.pool,
                stack: row.stack_id,
                owner: Owner::of(row),
                then: None,
                died: None,
                inferred: false,
                given: self.inside && row.event != EventName::Live && self.is_of(kind, row.device),
            };
            if self.memory.alloc(&self.extent(row, kind), block.id, block) {
                self.problems.double_allocs += 1;
                self.problems
                    .example(|| format!("seq {}: alloc_id {} was live already", row.seq, row.alloc_id));
            } else {
                let device = self.memory.devices.device(row.device);
                device.live_blocks += 1;
                device.given = device.given.wrapping_add(if block.given { block.bytes } else { 0 });
            }
        }
        self.totals(row);
    }

    fn free(&mut self, row: &Record, kind: MemoryKind) {
        if row.alloc_id != 0 {
            let (extent, death) = (self.extent(row, kind), Death { step: self.step, phase: self.phase });
            self.freed = self.memory.free(row.alloc_id, death, |_| extent.freed());
            if let Some(left) = self.freed {
                self.gone(row, left);
            } else {
                self.problems.unmatched_frees += 1;
                self.problems.example(|| {
                    format!("seq {}: frees alloc_id {}, which is not live", row.seq, row.alloc_id)
                });
            }
        }
        self.totals(row);
    }

    /// What the row gave back is no longer live.
    fn gone(&mut self, row: &Record, left: FreedSlot) {
        let Some(block) = self.memory.live.removed(left) else { return };
        let (id, device, bytes) = (block.id, block.device, block.bytes);
        let is_unowned = block.given && block.owner.is_nobody();
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
        if id <= device.peak(tracked).seq
            && let Some(block) = self.memory.live.removed(left).copied()
        {
            self.memory.devices.device(block.device).gone.push(block);
        }
        if is_unowned && let Some(block) = self.memory.live.removed(left).copied() {
            self.unowned(block);
        }
    }

    /// A block is gone that nobody owned. Whether the trace has tags, and so infers nothing, is not known
    /// yet.
    #[cold]
    fn unowned(&mut self, mut block: Block) {
        self.type_by_inference(std::slice::from_mut(&mut block));
        let unowned = &mut self.memory.devices.device(block.device).unowned;
        unowned.all = unowned.all.wrapping_add(block.bytes);
        if !block.owner.is_nobody() {
            unowned.inferred = unowned.inferred.wrapping_add(block.bytes);
        }
    }

    /// The bytes that a device's blocks had in all when they were handed out in the window: those that nobody
    /// owned when they went back, or at the end, and all of them.
    #[must_use]
    pub fn given(&self, ordinal: i32) -> (i64, i64) {
        let Some(device) = self.find(ordinal) else { return (0, 0) };
        let blocks = self.memory.live.values().filter(|block| block.device == ordinal && block.given);
        let live = self.typed(blocks.filter(|block| block.owner.is_nobody()).copied().collect());
        let live = live.iter().filter(|block| block.owner.is_nobody()).map(|block| block.bytes);
        let inferred = if self.infers() { device.unowned.inferred } else { 0 };
        (live.fold(device.unowned.all.wrapping_sub(inferred), i64::wrapping_add), device.given)
    }

    /// The row that takes bytes out of the old owner comes first; the one that gives them to the new
    /// owner tells it.
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

    /// Does the trace leave categories to inference: has it blocks, and no tag?
    #[must_use]
    pub fn infers(&self) -> bool {
        self.counts.of(EventName::Tag) == 0 && (self.first_forward.is_some() || !self.flow.is_empty())
    }

    /// The blocks with the categories that inference gives them, where it does.
    fn typed(&self, mut blocks: Vec<Block>) -> Vec<Block> {
        if self.infers() {
            self.type_by_inference(&mut blocks);
        }
        blocks
    }

    /// Gives blocks the categories that inference has for them.
    fn type_by_inference(&self, blocks: &mut [Block]) {
        if self.flow.is_empty() {
            categories::infer(blocks, self);
        } else {
            self.flow.apply(blocks);
        }
    }

    /// Does a block of this kind count among those of that device?
    fn is_of(&self, kind: MemoryKind, ordinal: i32) -> bool {
        match kind {
            MemoryKind::Block => true,
            MemoryKind::External => self.tracked == Metric::Used,
            MemoryKind::Host => ordinal == HOST,
            // Segments have no block.
            MemoryKind::Segment | MemoryKind::Mapped => false,
        }
    }

    /// What is live on a device now: torch's blocks, or pinned memory on the host. With `as_of`, nothing
    /// is inferred.
    #[must_use]
    pub fn live_on(&self, ordinal: i32, as_of: bool) -> Vec<Block> {
        let here = |block: &&Block| block.device == ordinal && block.kind != MemoryKind::External;
        let blocks = self.memory.live.values().filter(here).copied().collect();
        if as_of { blocks } else { self.typed(blocks) }
    }

    /// What was live on a device at its peak of the tracked metric. With `as_of`, each block has the
    /// owner that it had then, else the one that it had last.
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
        if as_of { blocks } else { self.typed(blocks) }
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
