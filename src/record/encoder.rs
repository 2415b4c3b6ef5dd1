//! Events into rows: owns the map from address to owner, keeps the devices' totals, assigns `seq`.
//!
//! One encoder serves the writer thread and, over a journal that a killed process left,
//! `memtrace check --repair`. It sees the events of all threads in the order of their clocks.

use memtrace_trace::rounding::Rounding;
use memtrace_trace::schema::{NONE, safe_text};
use memtrace_trace::{Api, Category, Event, EventName, Kind, Row};
use rustc_hash::FxHashMap;

use crate::intern::{Context, Frame, StackId};
use crate::summary::Statistics;

mod opening;

/// The library that reports blocks.
const TORCH_ALLOCATOR: &str = "libc10_cuda.so";
/// The library that writes rows of its own accord.
const LIBRARY: &str = "libmemtrace.so";

/// Where rows go.
pub trait RowSink {
    /// Why a row could not be taken.
    type Error;
    /// Takes a row.
    ///
    /// # Errors
    /// The sink's.
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error>;
}

/// A device's totals, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Blocks handed out.
    pub allocated: i64,
    /// Blocks handed out, or freed and still in use by a stream.
    pub active: i64,
    /// Segments held.
    pub reserved: i64,
    /// Memory outside torch's allocator.
    pub external: i64,
}

/// What is live at an address: the first row of it, which the free repeats.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// The `seq` of its row.
    pub alloc_id: i64,
    /// The device; -1 for the host.
    pub device: i8,
    /// As in the row.
    pub requested: i64,
    /// As in the row.
    pub rounded: i64,
    /// The bytes that it really takes.
    pub bytes: i64,
    /// Who owns it.
    pub context: u32,
    /// What it is for.
    pub category: Category,
    /// The step it was made in.
    pub step: i32,
    /// What gave it: a block, a segment, memory outside torch's allocator, pinned memory.
    pub what: What,
    /// The call that gave it, an [`Api`].
    pub api: u8,
    /// The text id of the library that made the call; 0 for a report.
    pub source: u32,
    /// The allocator's private pool; 0 for the default.
    pub pool: u16,
}

/// The kinds of memory that a trace tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A block of torch's allocator.
    Block,
    /// A segment of torch's allocator.
    Segment,
    /// Device memory of others.
    External,
    /// Pinned host memory.
    Host,
}

impl What {
    fn events(self) -> (EventName, EventName) {
        match self {
            What::Block => (EventName::Alloc, EventName::Free),
            What::Segment => (EventName::SegmentAlloc, EventName::SegmentFree),
            What::External => (EventName::ExtAlloc, EventName::ExtFree),
            What::Host => (EventName::HostAlloc, EventName::HostFree),
        }
    }
}

/// An OOM that was just encoded.
#[derive(Clone, Copy, Debug)]
pub struct OutOfMemory {
    /// The device.
    pub device: i8,
    /// The rounded request.
    pub bytes: i64,
    /// Who asked.
    pub context: u32,
}

/// The owner's texts, as they stand in the file.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// The innermost op.
    pub op: &'a str,
    /// The module path.
    pub module: &'a str,
    /// The phase.
    pub phase: &'a str,
}

/// What counts as odd, for the last row and the summary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oddities {
    /// Frees of an address that was not live.
    pub unmatched_frees: u64,
    /// Allocations at an address that was live.
    pub missed_frees: u64,
    /// Times the allocator's total of segments differed from the calls that were seen.
    pub corrections: u64,
    /// Times the allocator's total of blocks differed from the sum of its reports.
    pub gaps: u64,
}

/// Numbers from here on are the encoder's own.
const SEEDED: u32 = 1 << 31;

/// No address has this bit.
const CPU_TENSOR: u64 = 1 << 63;

/// Texts of a file that is continued, and contexts that no thread numbered: of such a file, of tags.
#[derive(Default)]
struct Seeds {
    numbers: FxHashMap<String, u32>,
    texts: Vec<String>,
    ids: FxHashMap<Context, u32>,
    contexts: Vec<Context>,
}

impl Seeds {
    fn number(&mut self, text: &str) -> u32 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        self.texts.push(text.to_owned());
        let number = SEEDED + self.texts.len() as u32;
        self.numbers.insert(text.to_owned(), number);
        number
    }

    fn text(&mut self, text: &str) -> u32 {
        if text == NONE { 0 } else { self.number(text) }
    }

    fn id(&mut self, context: Context) -> u32 {
        *self.ids.entry(context).or_insert_with(|| {
            self.contexts.push(context);
            SEEDED + self.contexts.len() as u32
        })
    }
}

/// See the module.
pub struct Encoder {
    start_ns: u64,
    rank: i32,
    pid: i32,
    rounding: Rounding,
    /// Do blocks come from reports? Else each call of torch's allocator is a block.
    caching: bool,
    seq: i64,
    texts: Vec<String>,
    contexts: Vec<Context>,
    stacks: Vec<Frame>,
    /// How many of `stacks` were given out by [`Encoder::new_stacks`].
    stacks_told: usize,
    /// What reports gave, by address.
    blocks: FxHashMap<u64, Live>,
    /// What runtime calls gave, by address: a segment begins where its first block does.
    regions: FxHashMap<u64, Live>,
    /// Blocks that were freed and are still in use by a stream, by address.
    deferred: FxHashMap<u64, Live>,
    devices: Vec<Totals>,
    pinned: i64,
    seeds: Seeds,
    oom: Option<OutOfMemory>,
    told_lost: u64,
    /// What was odd.
    pub oddities: Oddities,
    /// Counts, sizes and latencies.
    pub statistics: Statistics,
}

impl Encoder {
    /// Rows count their time from `start_ns`.
    #[must_use]
    pub fn new(start_ns: u64, rank: i32, pid: u32, rounding: Rounding, caching: bool) -> Encoder {
        Encoder {
            start_ns,
            rank,
            pid: pid as i32,
            rounding,
            caching,
            seq: 0,
            texts: Vec::new(),
            contexts: Vec::new(),
            stacks: Vec::new(),
            stacks_told: 0,
            blocks: FxHashMap::default(),
            regions: FxHashMap::default(),
            deferred: FxHashMap::default(),
            devices: Vec::new(),
            pinned: 0,
            seeds: Seeds::default(),
            oom: None,
            told_lost: 0,
            oddities: Oddities::default(),
            statistics: Statistics::default(),
        }
    }

    /// Learns what `definition` says; `slots` are the bytes behind it.
    pub fn define(&mut self, definition: &Event, slots: &[u8]) {
        let id = definition.addr as u32;
        match definition.kind() {
            Some(Kind::DefineText) => {
                let length = slots.len().min(definition.size.max(0) as usize);
                self.define_text(id, &String::from_utf8_lossy(&slots[..length]));
            }
            Some(Kind::DefineContext) => self.define_context(id, definition),
            Some(Kind::DefineStack) => {
                let frame = Frame { parent: definition.size as StackId, op: definition.extra as u32 };
                self.define_stack(id, frame);
            }
            _ => {}
        }
    }

    /// Learns the text of a number.
    pub fn define_text(&mut self, id: u32, text: &str) {
        let index = id as usize;
        if self.texts.len() < index {
            self.texts.resize(index, NONE.to_owned());
        }
        if let Some(place) = index.checked_sub(1).and_then(|index| self.texts.get_mut(index)) {
            *place = safe_text(text);
        }
    }

    /// Learns the context of a number, from the fields of its event.
    pub fn define_context(&mut self, id: u32, event: &Event) {
        let index = id as usize;
        if self.contexts.len() < index {
            self.contexts.resize(index, Context::default());
        }
        if let Some(place) = index.checked_sub(1).and_then(|index| self.contexts.get_mut(index)) {
            *place = Context {
                op: event.size as u32,
                module: event.allocated as u32,
                phase: event.reserved as u32,
                stack: event.extra as u32,
                stream: event.clock_ns as i64,
                flags: event.flags,
            };
        }
    }

    /// Learns the stack of a number.
    fn define_stack(&mut self, id: StackId, frame: Frame) {
        let index = id as usize;
        if self.stacks.len() < index {
            self.stacks.resize(index, Frame::default());
        }
        if let Some(place) = index.checked_sub(1).and_then(|index| self.stacks.get_mut(index)) {
            *place = frame;
        }
    }

    /// Were stacks learned since the last [`Encoder::new_stacks`]?
    #[must_use]
    pub fn has_new_stacks(&self) -> bool {
        self.stacks_told < self.stacks.len()
    }

    /// The first `count` stacks are in the file already.
    pub fn stacks_are_told(&mut self, count: usize) {
        self.stacks_told = count.min(self.stacks.len());
    }

    /// Stacks learned since the last call: number, what is around it, and the ops outermost first.
    pub fn new_stacks(&mut self) -> Vec<(StackId, StackId, Vec<&str>)> {
        let first = std::mem::replace(&mut self.stacks_told, self.stacks.len());
        let ids = first as StackId + 1..self.stacks.len() as StackId + 1;
        ids.map(|id| {
            let mut ops = Vec::new();
            let mut next = id;
            // A stack's parent has a smaller number, so this ends.
            while let Some(frame) = (next as usize).checked_sub(1).and_then(|index| self.stacks.get(index)) {
                ops.push(self.text(frame.op));
                next = if frame.parent < next { frame.parent } else { 0 };
            }
            ops.reverse();
            let parent = self.stacks[id as usize - 1].parent;
            (id, parent, ops)
        })
        .collect()
    }

    /// The meta row, the first of a file.
    ///
    /// # Errors
    /// The sink's.
    pub fn meta<S: RowSink>(&mut self, json: &str, sink: &mut S) -> Result<(), S::Error> {
        sink.row(&Row { event: EventName::Meta, name: json, ..self.blank(self.start_ns) })?;
        self.seq += 1;
        Ok(())
    }

    /// The last row of a complete file; `dropped` is the number of events that were lost in all, `how`
    /// the process ended.
    ///
    /// # Errors
    /// The sink's.
    pub fn end<S: RowSink>(
        &mut self,
        clock_ns: u64,
        dropped: u64,
        how: &str,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let untold = dropped.saturating_sub(self.told_lost);
        if untold > 0 {
            self.lost(clock_ns, 0, untold, sink)?;
        }
        let Oddities { unmatched_frees, missed_frees, corrections, gaps } = self.oddities;
        let dropped = dropped.max(self.told_lost);
        let name = format!(
            "{how} lost={dropped} unmatched_frees={unmatched_frees} missed_frees={missed_frees} corrections={corrections} gaps={gaps}"
        );
        sink.row(&Row { event: EventName::End, name: &name, ..self.blank(clock_ns) })?;
        self.seq += 1;
        Ok(())
    }

    /// Takes a row that is in the file already: what it did to the memory, and its number.
    pub fn seed(&mut self, row: &Row<'_>) {
        self.seq = row.seq;
        let Ok(device) = i8::try_from(row.device) else { return };
        if device >= 0 {
            let totals = self.device(device);
            (totals.allocated, totals.active) = (row.allocated_bytes, row.active_bytes);
            totals.reserved = row.reserved_bytes;
            self.statistics.peak(device, row.allocated_bytes, row.reserved_bytes);
        } else {
            self.pinned = row.allocated_bytes;
        }
        let what = match row.event {
            EventName::Tag if row.delta_bytes < 0 => return,
            EventName::Alloc
            | EventName::Free
            | EventName::Live
            | EventName::FreeCompleted
            | EventName::Tag => What::Block,
            EventName::SegmentAlloc | EventName::SegmentFree => What::Segment,
            EventName::ExtAlloc | EventName::ExtFree => What::External,
            EventName::HostAlloc | EventName::HostFree => What::Host,
            EventName::Lost => {
                self.told_lost += row.requested_bytes.max(0) as u64;
                return;
            }
            _ => return,
        };
        if what == What::External {
            self.device(device).external += row.delta_bytes;
        }
        let cpu_tensor = if row.api == Api::CpuAllocator.name() { CPU_TENSOR } else { 0 };
        let addr = row.addr as u64 | cpu_tensor;
        let is_report = row.api == Api::CachingAllocator.name()
            || (row.event == EventName::Tag && self.blocks.contains_key(&addr));
        self.caching |= is_report;
        match row.event {
            EventName::FreeCompleted => {
                self.deferred.remove(&addr);
            }
            EventName::Free if is_report => {
                let live = self.blocks.remove(&addr);
                // By the file alone: had the block been given up by its streams, active would have fallen.
                if let Some(live) = live.filter(|_| row.active_bytes > row.allocated_bytes) {
                    self.deferred.insert(addr, live);
                }
            }
            EventName::Free | EventName::SegmentFree | EventName::ExtFree | EventName::HostFree => {
                self.regions.remove(&addr);
            }
            _ if row.alloc_id == 0 => {}
            _ => {
                let context = self.seed_context(row);
                let live = Live {
                    alloc_id: row.alloc_id,
                    device,
                    requested: row.requested_bytes,
                    rounded: row.rounded_bytes,
                    bytes: row.delta_bytes,
                    context,
                    category: row.category,
                    step: row.step as i32,
                    what,
                    api: Api::parse(row.api).map_or(0, |api| api as u8),
                    source: if is_report { 0 } else { self.seeds.text(row.source) },
                    pool: row.pool as u16,
                };
                let map = if is_report { &mut self.blocks } else { &mut self.regions };
                map.insert(addr, live);
            }
        }
    }

    /// A context of the file's own texts, numbered apart from those of the process.
    fn seed_context(&mut self, row: &Row<'_>) -> u32 {
        let context = Context {
            op: self.seeds.text(row.op),
            module: self.seeds.text(row.module),
            phase: self.seeds.text(row.phase),
            stack: row.stack_id as u32,
            stream: row.stream,
            flags: 0,
        };
        self.seeds.id(context)
    }

    /// The rows of one event of thread `tid`.
    ///
    /// # Errors
    /// The sink's.
    pub fn encode<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        match event.kind() {
            Some(Kind::Block) => self.block(tid, event, sink),
            Some(Kind::OutOfMemory) => self.out_of_memory(tid, event, sink),
            Some(Kind::DeviceAlloc | Kind::HostAlloc) => self.call_alloc(tid, event, sink),
            Some(Kind::DeviceFree | Kind::HostFree) => self.call_free(tid, event, sink),
            Some(Kind::RangeBegin) => self.named(EventName::RangeBegin, tid, event, sink),
            Some(Kind::RangeEnd) => self.named(EventName::RangeEnd, tid, event, sink),
            Some(Kind::Mark) => self.named(EventName::Mark, tid, event, sink),
            Some(Kind::FreeCompleted) => self.free_completed(tid, event, sink),
            Some(Kind::Op) => self.op(tid, event, sink),
            Some(Kind::Tag) => self.tag(tid, event, sink),
            Some(Kind::Lost) => self.lost(event.clock_ns, tid, event.size.max(0) as u64, sink),
            _ => Ok(()),
        }
    }

    /// The OOM encoded since the last call.
    pub fn take_oom(&mut self) -> Option<OutOfMemory> {
        self.oom.take()
    }

    /// What is live now.
    pub fn live(&self) -> impl Iterator<Item = &Live> {
        self.blocks.values().chain(self.regions.values())
    }

    /// The totals of a device; all zero for one that was never used.
    #[must_use]
    pub fn totals(&self, device: i8) -> Totals {
        match usize::try_from(device) {
            Ok(index) => self.devices.get(index).copied().unwrap_or_default(),
            Err(_) => {
                Totals { allocated: self.pinned, active: self.pinned, reserved: self.pinned, external: 0 }
            }
        }
    }

    /// Every device that was used, with its totals.
    pub fn devices(&self) -> impl Iterator<Item = (usize, Totals)> {
        self.devices.iter().copied().enumerate()
    }

    /// The rows so far.
    #[must_use]
    pub fn rows(&self) -> i64 {
        self.seq
    }

    /// The texts of a context.
    #[must_use]
    pub fn owner(&self, context: u32) -> Owner<'_> {
        let Context { op, module, phase, .. } = self.context(context);
        Owner { op: self.text(op), module: self.text(module), phase: self.text(phase) }
    }

    fn block<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        self.caching = true;
        self.reconcile(tid, event, sink)?;
        // An address that is handed out again was freed, and that report was lost.
        if event.size >= 0
            && let Some(missed) = self.blocks.remove(&event.addr)
        {
            self.oddities.missed_frees += 1;
            let totals = self.device(missed.device);
            totals.allocated -= missed.bytes;
            totals.active -= missed.bytes;
            self.freed(tid, event, &missed, sink)?;
        }
        let totals = self.device(event.device);
        // What other reports that were lost did to the total.
        let gap = (event.allocated as i64).wrapping_sub(totals.allocated).wrapping_sub(event.size);
        let deferred = event.flags & Event::DEFERRED != 0;
        totals.active = totals.active.wrapping_add(gap).wrapping_add(if deferred { 0 } else { event.size });
        totals.allocated = event.allocated as i64;
        self.oddities.gaps += u64::from(gap != 0);
        self.statistics.peak(event.device, event.allocated as i64, event.reserved as i64);
        let unknown = Live {
            alloc_id: 0,
            device: event.device,
            requested: event.extra,
            rounded: match event.extra {
                requested @ 0.. => self.rounding.round(requested as u64) as i64,
                _ => event.size.abs(),
            },
            bytes: event.size.abs(),
            context: event.context,
            category: Category::None,
            step: event.step,
            what: What::Block,
            api: event.api,
            source: 0,
            pool: event.source,
        };
        if event.size >= 0 {
            self.statistics.block(event.size);
            let category = self.category_at_birth(event.context);
            let live = Live { alloc_id: self.seq + 1, category, ..unknown };
            // An address that is handed out again is in use by no stream.
            if let Some(deferred) = self.deferred.remove(&event.addr) {
                self.device(event.device).active -= deferred.bytes;
            }
            self.blocks.insert(event.addr, live);
            self.allocated(tid, event, &live, sink)
        } else {
            let live = self.blocks.remove(&event.addr);
            self.oddities.unmatched_frees += u64::from(live.is_none());
            // The report's size is the truth; what was remembered only names the owner.
            let live = Live { bytes: unknown.bytes, ..live.unwrap_or(unknown) };
            if deferred {
                self.deferred.insert(event.addr, live);
            }
            self.freed(tid, event, &live, sink)
        }
    }

    /// The last stream that used a freed block is done with it: now it can be handed out again.
    fn free_completed<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let Some(live) = self.deferred.remove(&event.addr) else {
            self.oddities.unmatched_frees += 1;
            return Ok(());
        };
        self.device(live.device).active -= live.bytes;
        sink.row(&Row {
            event: EventName::FreeCompleted,
            api: Api::CachingAllocator.name(),
            source: TORCH_ALLOCATOR,
            alloc_id: live.alloc_id,
            delta_bytes: -live.bytes,
            latency_ns: 0,
            ..self.of_live(tid, event, &live)
        })?;
        self.seq += 1;
        Ok(())
    }

    /// A block's bytes leave one owner and enter another, in two rows; totals stay.
    fn tag<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let category = Category::ALL.get(event.size.max(0) as usize).copied().unwrap_or(Category::None);
        let map = if self.blocks.contains_key(&event.addr) { &self.blocks } else { &self.regions };
        let Some(before) = map.get(&event.addr).copied().filter(|live| live.what == What::Block) else {
            return Ok(());
        };
        let mut context = self.context(before.context);
        if event.extra > 0 {
            context.module = event.extra as u32;
        }
        // What was given to the model may be something that is known better already.
        let weaker = category == Category::Input && before.category != Category::None;
        let same =
            before.category == category && self.text(context.module) == self.owner(before.context).module;
        if weaker || same {
            return Ok(());
        }
        if category == Category::Input && context.phase == 0 {
            // The script made or moved it, outside of everything that has a phase.
            context.phase = self.seeds.number("dataloader");
        }
        let context = self.seeds.id(context);
        let after = Live { category, context, ..before };
        for (live, bytes) in [(before, -before.bytes), (after, before.bytes)] {
            sink.row(&Row {
                event: EventName::Tag,
                delta_bytes: bytes,
                source: LIBRARY,
                latency_ns: 0,
                name: self.text(event.reserved as u32),
                ..self.of_live(tid, event, &live)
            })?;
            self.seq += 1;
        }
        let map = if self.blocks.contains_key(&event.addr) { &mut self.blocks } else { &mut self.regions };
        map.insert(event.addr, after);
        Ok(())
    }

    fn op<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        sink.row(&Row {
            event: EventName::Op,
            source: LIBRARY,
            delta_bytes: event.size,
            latency_ns: event.extra,
            ..self.base(tid, event, event.device, event.context)
        })?;
        self.seq += 1;
        Ok(())
    }

    /// A report carries the allocator's own total of segments. Where calls went unseen (expandable
    /// segments, a pool with an allocator of its own) a row makes up the difference.
    fn reconcile<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let totals = self.device(event.device);
        let delta = event.reserved as i64 - totals.reserved;
        if delta == 0 {
            return Ok(());
        }
        totals.reserved = event.reserved as i64;
        self.oddities.corrections += 1;
        let what = if delta > 0 { EventName::SegmentMap } else { EventName::SegmentUnmap };
        sink.row(&Row {
            event: what,
            status: 0,
            api: Api::Reconciled.name(),
            source: TORCH_ALLOCATOR,
            delta_bytes: delta,
            ..self.base(tid, event, event.device, event.context)
        })?;
        self.seq += 1;
        Ok(())
    }

    fn out_of_memory<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        self.reconcile(tid, event, sink)?;
        self.oom = Some(OutOfMemory { device: event.device, bytes: event.size, context: event.context });
        self.statistics.ooms += 1;
        sink.row(&Row {
            event: EventName::Oom,
            // cudaErrorMemoryAllocation: what torch would have returned, had it a status.
            status: 2,
            source: TORCH_ALLOCATOR,
            requested_bytes: event.extra,
            rounded_bytes: event.size,
            ..self.base(tid, event, event.device, event.context)
        })?;
        self.seq += 1;
        Ok(())
    }

    fn call_alloc<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let what = self.what_a_call_takes(event);
        self.statistics.call(event.api, event.extra, event.status != 0);
        let given = event.status == 0 && event.addr != 0;
        let live = Live {
            alloc_id: if given { self.seq + 1 } else { 0 },
            device: event.device,
            requested: event.size,
            rounded: event.size,
            bytes: if given { event.size } else { 0 },
            context: event.context,
            category: if what == What::Block {
                self.category_at_birth(event.context)
            } else {
                Category::None
            },
            step: event.step,
            what,
            api: event.api,
            source: event.reserved as u32,
            pool: event.source,
        };
        if given {
            if what == What::Block {
                self.statistics.block(live.bytes);
            }
            // An address that is given out again was freed in a way that nobody saw.
            if let Some(missed) = self.regions.insert(Encoder::key(event), live) {
                self.oddities.missed_frees += 1;
                self.change(&missed, -missed.bytes);
                self.freed(tid, event, &missed, sink)?;
                self.regions.insert(Encoder::key(event), Live { alloc_id: self.seq + 1, ..live });
            }
            let live = Live { alloc_id: self.seq + 1, ..live };
            self.change(&live, live.bytes);
            return self.allocated(tid, event, &live, sink);
        }
        self.allocated(tid, event, &live, sink)
    }

    fn call_free<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let live = if event.status == 0 { self.regions.remove(&Encoder::key(event)) } else { None };
        // CPU tensors may be older than the trace.
        if live.is_none() && event.api == Api::CpuAllocator as u8 {
            return Ok(());
        }
        self.statistics.call(event.api, event.extra, event.status != 0);
        self.oddities.unmatched_frees += u64::from(event.status == 0 && live.is_none());
        let live = live.unwrap_or(Live {
            alloc_id: 0,
            device: event.device.max(if event.device == Event::HOST { Event::HOST } else { 0 }),
            requested: -1,
            rounded: 0,
            bytes: 0,
            context: event.context,
            category: Category::None,
            step: event.step,
            what: self.what_a_call_takes(event),
            api: event.api,
            source: event.reserved as u32,
            pool: event.source,
        });
        self.change(&live, -live.bytes);
        self.freed(tid, event, &live, sink)
    }

    /// The key of a region: a CPU tensor may be registered as pinned memory at its own address.
    fn key(event: &Event) -> u64 {
        if event.api == Api::CpuAllocator as u8 { event.addr | CPU_TENSOR } else { event.addr }
    }

    /// The address of a key.
    fn address(key: u64) -> u64 {
        key & !CPU_TENSOR
    }

    /// What the memory of a runtime call is: by who called, and by whether torch's allocator reports.
    fn what_a_call_takes(&self, event: &Event) -> What {
        match event.kind() {
            Some(Kind::HostAlloc | Kind::HostFree) => What::Host,
            _ if event.flags & Event::FROM_TORCH_ALLOCATOR == 0 => What::External,
            _ if self.caching => What::Segment,
            _ => What::Block,
        }
    }

    fn change(&mut self, live: &Live, bytes: i64) {
        match live.what {
            What::Host => self.pinned += bytes,
            What::External => self.device(live.device).external += bytes,
            What::Segment => self.device(live.device).reserved += bytes,
            What::Block => {
                let totals = self.device(live.device);
                totals.allocated += bytes;
                totals.active += bytes;
                totals.reserved += bytes;
            }
        }
        let Totals { allocated, reserved, .. } = self.totals(live.device);
        self.statistics.peak(live.device, allocated, reserved);
    }

    fn allocated<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        live: &Live,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let row =
            Row { event: live.what.events().0, delta_bytes: live.bytes, ..self.of_live(tid, event, live) };
        sink.row(&row)?;
        self.seq += 1;
        Ok(())
    }

    fn freed<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        live: &Live,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let row =
            Row { event: live.what.events().1, delta_bytes: -live.bytes, ..self.of_live(tid, event, live) };
        sink.row(&row)?;
        self.seq += 1;
        Ok(())
    }

    fn named<S: RowSink>(
        &mut self,
        what: EventName,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let base = self.base(tid, event, Event::HOST, event.context);
        sink.row(&Row { event: what, source: LIBRARY, name: self.text(event.extra as u32), ..base })?;
        self.seq += 1;
        Ok(())
    }

    fn lost<S: RowSink>(
        &mut self,
        clock_ns: u64,
        tid: u32,
        events: u64,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.told_lost += events;
        let name = format!("{events} events dropped: the writer fell behind");
        let (event, requested_bytes) = (EventName::Lost, events as i64);
        sink.row(&Row { event, tid: tid as i32, requested_bytes, name: &name, ..self.blank(clock_ns) })?;
        self.seq += 1;
        Ok(())
    }

    /// A row about what is live, its owner as it was when it was given out.
    fn of_live<'a>(&'a self, tid: u32, event: &Event, live: &Live) -> Row<'a> {
        let is_call = event.kind() != Some(Kind::Block);
        Row {
            alloc_id: live.alloc_id,
            addr: event.addr as i64,
            requested_bytes: live.requested,
            rounded_bytes: live.rounded,
            category: live.category,
            step: i64::from(live.step),
            pool: i64::from(live.pool),
            source: if is_call { self.text(event.reserved as u32) } else { TORCH_ALLOCATOR },
            latency_ns: if is_call { event.extra } else { 0 },
            ..self.base(tid, event, live.device, live.context)
        }
    }

    /// What every row of an event has.
    fn base(&self, tid: u32, event: &Event, device: i8, context: u32) -> Row<'_> {
        let Owner { op, module, phase } = self.owner(context);
        let Context { stack, stream, .. } = self.context(context);
        let Totals { allocated, active, reserved, .. } = self.totals(device);
        Row {
            stack_id: i64::from(stack),
            stream,
            pool: i64::from(event.source),
            tid: tid as i32,
            device: i32::from(device),
            status: i32::from(event.status),
            api: Api::from_code(event.api).map_or(NONE, Api::name),
            allocated_bytes: allocated,
            active_bytes: active,
            reserved_bytes: reserved,
            op,
            module,
            phase,
            step: i64::from(event.step),
            ..self.blank(event.clock_ns)
        }
    }

    /// A row of our own: no thread, no memory.
    fn blank(&self, clock_ns: u64) -> Row<'static> {
        Row {
            seq: self.seq + 1,
            ts_ns: clock_ns.saturating_sub(self.start_ns) as i64,
            rank: self.rank,
            pid: self.pid,
            tid: self.pid,
            api: Api::Memtrace.name(),
            source: LIBRARY,
            allocated_bytes: self.pinned,
            active_bytes: self.pinned,
            reserved_bytes: self.pinned,
            ..Row::default()
        }
    }

    /// What memory is for as far as the moment of its allocation tells: see "What memory is for".
    fn category_at_birth(&self, context: u32) -> Category {
        let context = self.context(context);
        match self.text(context.phase) {
            "optimizer" | "optimizer.step" => Category::OptimizerState,
            "backward" if context.flags & Context::RECOMPUTED == 0 => Category::Temporary,
            "forward" | "backward" => Category::Activation,
            _ => Category::None,
        }
    }

    fn context(&self, id: u32) -> Context {
        let (contexts, id) =
            if id > SEEDED { (&self.seeds.contexts, id - SEEDED) } else { (&self.contexts, id) };
        (id as usize).checked_sub(1).and_then(|index| contexts.get(index)).copied().unwrap_or_default()
    }

    fn text(&self, id: u32) -> &str {
        let (texts, id) = if id > SEEDED { (&self.seeds.texts, id - SEEDED) } else { (&self.texts, id) };
        (id as usize).checked_sub(1).and_then(|index| texts.get(index)).map_or(NONE, String::as_str)
    }

    fn device(&mut self, device: i8) -> &mut Totals {
        let index = device.max(0) as usize;
        if self.devices.len() <= index {
            self.devices.resize(index + 1, Totals::default());
        }
        &mut self.devices[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps what the tests look at.
    #[derive(Default)]
    struct Rows(Vec<(i64, EventName, i64, i64, i64, i64, String)>);

    impl RowSink for Rows {
        type Error = std::convert::Infallible;
        fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
            let Row { seq, event, alloc_id, delta_bytes, allocated_bytes, reserved_bytes, module, .. } = *row;
            self.0.push((
                seq,
                event,
                alloc_id,
                delta_bytes,
                allocated_bytes,
                reserved_bytes,
                module.to_owned(),
            ));
            Ok(())
        }
    }

    fn encoder() -> Encoder {
        Encoder::new(0, 0, 1, Rounding::default(), true)
    }

    fn block(addr: u64, size: i64, allocated: u64, reserved: u64) -> Event {
        Event { kind: Kind::Block as u8, addr, size, allocated, reserved, extra: -1, ..Event::default() }
    }

    fn segment(addr: u64, size: i64, status: i16) -> Event {
        let flags = Event::FROM_TORCH_ALLOCATOR;
        Event { kind: Kind::DeviceAlloc as u8, addr, size, status, flags, ..Event::default() }
    }

    fn run(encoder: &mut Encoder, events: &[Event]) -> Rows {
        let mut rows = Rows::default();
        for event in events {
            encoder.encode(1, event, &mut rows).unwrap();
        }
        rows
    }

    #[test]
    fn a_block_at_the_start_of_its_segment_is_told_apart_from_it() {
        let events = [segment(64, 2 << 20, 0), block(64, 512, 512, 2 << 20), block(64, -512, 0, 2 << 20)];
        let rows = run(&mut encoder(), &events).0;
        let expected = [
            (1, EventName::SegmentAlloc, 1, 2 << 20, 0, 2 << 20, NONE.to_owned()),
            (2, EventName::Alloc, 2, 512, 512, 2 << 20, NONE.to_owned()),
            (3, EventName::Free, 2, -512, 0, 2 << 20, NONE.to_owned()),
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn a_failed_call_changes_nothing_and_an_unseen_segment_is_reconciled() {
        let mut encoder = encoder();
        let rows = run(&mut encoder, &[segment(0, 1 << 30, 2), block(64, 512, 512, 2 << 20)]).0;
        assert_eq!(rows[0], (1, EventName::SegmentAlloc, 0, 0, 0, 0, NONE.to_owned()));
        assert_eq!(rows[1].1, EventName::SegmentMap);
        assert_eq!(rows[1].3, 2 << 20);
        assert_eq!(encoder.oddities.corrections, 1);
    }

    #[test]
    fn a_free_carries_the_owner_of_its_allocation_and_a_reused_address_gets_a_new_id() {
        let mut encoder = encoder();
        encoder.define_text(1, "GPT.h.0");
        encoder.define_context(1, &Event { allocated: 1, ..Event::default() });
        let owned = Event { context: 1, ..block(64, 512, 512, 0) };
        let rows = run(&mut encoder, &[owned, block(64, -512, 0, 0), block(64, 512, 512, 0)]).0;
        assert_eq!((rows[1].2, rows[1].6.as_str()), (1, "GPT.h.0"));
        assert_eq!((rows[2].2, rows[2].6.as_str()), (3, NONE));
    }

    #[test]
    fn a_lost_report_leaves_neither_its_block_nor_its_bytes_behind() {
        let mut encoder = encoder();
        // Two frees were lost: of the block at 64, which is handed out again, and of the one at 4096.
        let events = [block(64, 512, 512, 0), block(4096, 1024, 1536, 0), block(64, 512, 512, 0)];
        let rows = run(&mut encoder, &events).0;
        let second: Vec<_> = rows.iter().skip(2).map(|row| (row.0, row.1, row.2, row.3, row.4)).collect();
        assert_eq!(second, [(3, EventName::Free, 1, -512, 1024), (4, EventName::Alloc, 4, 512, 512)]);
        let Totals { allocated, active, .. } = encoder.totals(0);
        assert_eq!((allocated, active), (512, 512));
        assert_eq!((encoder.oddities.missed_frees, encoder.oddities.gaps), (1, 1));
    }

    #[test]
    fn with_caching_off_a_call_is_a_block() {
        let mut encoder = Encoder::new(0, 0, 1, Rounding { caching: false, power2_divisions: 0 }, false);
        let free = Event { kind: Kind::DeviceFree as u8, addr: 64, device: -2, flags: 1, ..Event::default() };
        let rows = run(&mut encoder, &[segment(64, 1000, 0), free]).0;
        assert_eq!(rows[0], (1, EventName::Alloc, 1, 1000, 1000, 1000, NONE.to_owned()));
        assert_eq!(rows[1], (2, EventName::Free, 1, -1000, 0, 0, NONE.to_owned()));
    }

    #[test]
    fn what_was_lost_is_told_once() {
        let mut encoder = encoder();
        let lost = Event { kind: Kind::Lost as u8, size: 5, ..Event::default() };
        let mut rows = run(&mut encoder, &[lost]);
        encoder.end(9, 7, "exit", &mut rows).unwrap();
        let names: Vec<EventName> = rows.0.iter().map(|row| row.1).collect();
        assert_eq!(names, [EventName::Lost, EventName::Lost, EventName::End]);
    }
}
