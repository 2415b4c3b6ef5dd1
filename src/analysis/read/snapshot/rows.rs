//! Converts a snapshot into the rows of a trace.

use std::collections::BTreeMap;
use std::io::{self, Write};

use memtrace_trace::columns::TextKeys;
use memtrace_trace::csv::RowWriter;
use memtrace_trace::end_row::{Anomalies, EndText, Ending};
use memtrace_trace::memory::{Extent, MemoryKind, Totals};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::text::{NONE, TORCH_ALLOCATOR};
use memtrace_trace::{Api, Category, EventName, Row};
use rustc_hash::FxHashMap;

use super::super::LIVE;
use super::Snapshot;
use super::history::{Beginning, Held, Life, Memory, Reserved};
use super::model::{Action, Event, Model};
use super::owners::{Phase, StackId, StackTable};

/// The CUDA error `cudaErrorMemoryAllocation`.
const OUT_OF_MEMORY: i32 = 2;
/// The reason in the `lost` row.
const MISSING: &str = "the history of the snapshot has gaps: it contradicts itself or the blocks at its end";

/// Writes the rows.
///
/// # Errors
/// When the sink fails.
pub(super) fn write(snapshot: &Snapshot, sink: impl Write) -> io::Result<()> {
    let mut rows = Rows {
        writer: RowWriter::new(sink),
        snapshot,
        rounding: snapshot.rounding(),
        seq: 0,
        ts_ns: 0,
        step: -1,
        anomalies: Anomalies::default(),
    };
    let meta = snapshot.meta.to_json().map_err(io::Error::other)?;
    rows.add(Row {
        event: EventName::Meta,
        api: "memtrace",
        source: TORCH_ALLOCATOR,
        name: &meta,
        ..Row::default()
    })?;
    let mut devices: Vec<Device<'_>> = Vec::new();
    for (device, beginning) in &snapshot.beginnings {
        let mut at = Device {
            ordinal: *device,
            events: snapshot.model.events(*device),
            next: 0,
            beginning,
            memory: Memory::default(),
            ids: Ids::default(),
            totals: Totals::default(),
        };
        for (addr, reserved) in &beginning.memory.reserved {
            rows.reserve(&mut at, *addr, *reserved, LIVE)?;
        }
        // A block whose free is pending is allocated and freed at once. Before all others, such blocks add at
        // most the largest of them to the peak of allocated memory.
        for is_pending in [true, false] {
            for (addr, held) in beginning.memory.blocks.iter().filter(|(_, held)| held.pending == is_pending)
            {
                rows.alloc(&mut at, *addr, *held, None)?;
            }
        }
        devices.push(at);
    }
    // Write the events of all devices in order of time.
    while let Some(at) = devices.iter_mut().filter(|at| at.time().is_some()).min_by_key(|at| at.time()) {
        rows.event(at)?;
    }
    for at in &mut devices {
        rows.agree(at)?;
    }
    let Anomalies { unmatched_frees, missed_frees, corrections, gaps } = rows.anomalies;
    let missing = unmatched_frees + missed_frees + corrections + gaps;
    if missing > 0 {
        let requested_bytes = missing as i64;
        rows.add(Row {
            event: EventName::Lost,
            api: "memtrace",
            source: TORCH_ALLOCATOR,
            requested_bytes,
            name: MISSING,
            ..Row::default()
        })?;
    }
    let steps = format!("steps={}", snapshot.model.step_ends.len());
    let end =
        EndText { ending: Ending::Exit, more: &steps, lost: 0, anomalies: rows.anomalies, formulas: None };
    let end = snapshot.ending.get_or_init(|| end.to_string());
    rows.add(Row {
        event: EventName::End,
        api: "memtrace",
        source: TORCH_ALLOCATOR,
        name: end,
        ..Row::default()
    })?;
    rows.writer.flush()
}

/// The `seq` of the rows that allocated the current memory, by address.
#[derive(Default)]
struct Ids {
    reserved: BTreeMap<i64, i64>,
    blocks: FxHashMap<i64, Birth>,
}

/// The row that allocated a block.
#[derive(Clone, Copy, Default)]
struct Birth {
    seq: i64,
    step: i64,
    phase: Option<Phase>,
    category: Category,
}

/// The state of a device after the events written so far.
struct Device<'a> {
    ordinal: i32,
    events: &'a [Event],
    next: usize,
    beginning: &'a Beginning,
    memory: Memory,
    ids: Ids,
    totals: Totals,
}

impl Device<'_> {
    /// Returns the time of the next event in µs, or `None` after the last event.
    fn time(&self) -> Option<i64> {
        self.events.get(self.next).map(|event| event.time_us)
    }
}

struct Rows<'a, W: Write> {
    writer: RowWriter<W>,
    snapshot: &'a Snapshot,
    rounding: Rounding,
    seq: i64,
    ts_ns: i64,
    step: i64,
    anomalies: Anomalies,
}

impl<W: Write> Rows<'_, W> {
    /// Adds a row with the next `seq`. A negative `alloc_id` becomes this `seq`.
    fn add(&mut self, row: Row<'_>) -> io::Result<()> {
        self.seq += 1;
        let alloc_id = if row.alloc_id < 0 { self.seq } else { row.alloc_id };
        let rank = self.snapshot.meta.rank;
        self.writer.write(&Row { seq: self.seq, ts_ns: self.ts_ns, rank, alloc_id, ..row })
    }

    /// Returns a row about memory of a device, with the device's totals and the `stack_id` of a stack.
    fn row(&self, at: &Device<'_>, event: EventName, stack: StackId) -> Row<'static> {
        Row {
            device: at.ordinal,
            event,
            api: Api::CachingAllocator.as_str(),
            source: TORCH_ALLOCATOR,
            allocated_bytes: at.totals.allocated,
            active_bytes: at.totals.active,
            reserved_bytes: at.totals.reserved,
            step: self.step,
            stack_id: self.snapshot.model.owners.owner(stack).stack.into(),
            ..Row::default()
        }
    }

    /// Adds a row with the op and the module that a stack names, and with this phase and the row's category.
    fn add_owned(&mut self, row: Row<'_>, stack: StackId, phase: Option<Phase>) -> io::Result<()> {
        let owners = &self.snapshot.model.owners;
        let owner = owners.owner(stack);
        let modules = owners.module_count() as u64 + 1;
        let phases = u64::from(owner.op) * 4 + phase.map_or(0, |phase| phase as u64 + 1);
        let number = 1 + (phases * modules + u64::from(owner.module)) * 32 + row.category as u64;
        let (op, phase) = (owners.op(owner).unwrap_or(NONE), phase.map_or(NONE, Phase::as_str));
        let keys = TextKeys { owner: number, ..TextKeys::default() };
        self.add(Row { keys, op, phase, module: owners.module(owner).unwrap_or(NONE), ..row })
    }

    fn event(&mut self, at: &mut Device<'_>) -> io::Result<()> {
        let Some(event) = at.events.get(at.next).copied() else { return Ok(()) };
        let index = at.next as u32;
        at.next += 1;
        let start_us = self.snapshot.start_us;
        self.ts_ns = self.ts_ns.max(event.time_us.saturating_sub(start_us).saturating_mul(1000));
        let Event { action, addr, bytes, stream, stack, .. } = event;
        let end = addr.saturating_add(bytes);
        let model = &self.snapshot.model;
        let phase = model.phase(stack);
        if !model.step_ends.is_empty() && (self.step >= 0 || phase.is_some()) {
            self.step = model.step_at(event.time_us);
        }
        match action {
            Action::Alloc => {
                if at.memory.blocks.contains_key(&addr) {
                    self.anomalies.missed_frees += 1;
                    self.free(at, addr, false)?;
                }
                let rounded = self.rounding.round(bytes as u64) as i64;
                let max_split = self.snapshot.model.settings.max_split;
                let known = at.beginning.at_end.get(&index).copied();
                let bytes_of_block =
                    known.map_or_else(|| at.memory.block_size(addr, rounded, max_split), |known| known.bytes);
                let stack = known.map_or(stack, |known| known.stack);
                let held = Held { bytes: bytes_of_block, requested: bytes, stream, stack, pending: false };
                self.alloc(at, addr, held, Some(at.beginning.life(index, bytes)))
            }
            Action::FreeRequested => {
                let next = at.events.get(at.next);
                let is_completed =
                    next.is_some_and(|next| next.action == Action::FreeCompleted && next.addr == addr);
                at.next += usize::from(is_completed);
                self.free(at, addr, !is_completed)
            }
            Action::FreeCompleted => self.free(at, addr, false),
            Action::SegmentAlloc | Action::SegmentMap => {
                self.unreserve(at, addr, end)?;
                let pool = at.beginning.pools.get(&index).copied().unwrap_or(0);
                let expandable = action == Action::SegmentMap;
                self.reserve(at, addr, Reserved { end, stream, pool, expandable, stack }, NONE)
            }
            Action::SegmentFree | Action::SegmentUnmap => self.unreserve(at, addr, end),
            Action::Oom => {
                let row = Row {
                    status: OUT_OF_MEMORY,
                    requested_bytes: bytes,
                    rounded_bytes: bytes,
                    device_free_bytes: addr,
                    stream,
                    ..self.row(at, EventName::Oom, stack)
                };
                self.add_owned(row, stack, phase)
            }
            Action::Snapshot | Action::Unknown => Ok(()),
        }
    }

    /// Writes the allocation of a block. `life` is `None` if the block exists when the history begins.
    fn alloc(&mut self, at: &mut Device<'_>, addr: i64, held: Held, life: Option<Life>) -> io::Result<()> {
        at.totals.add(&extent(at, MemoryKind::Block, held.bytes));
        at.memory.blocks.insert(addr, Held { pending: false, ..held });
        let model = &self.snapshot.model;
        // Without a stack, a block from before the history may be anything.
        let is_known = life.is_some() || !StackTable::is_empty(held.stack);
        let phase = is_known.then(|| model.phase(held.stack)).flatten();
        let pool = at.memory.around(addr).map_or(0, |segment| segment.pool);
        let category = category(model, held.stack, phase, life.unwrap_or(Life::Long), pool);
        at.ids.blocks.insert(addr, Birth { seq: self.seq + 1, step: self.step, phase, category });
        let (event, name) = if life.is_some() { (EventName::Alloc, NONE) } else { (EventName::Live, LIVE) };
        let row = Row { alloc_id: -1, delta_bytes: held.bytes, ..self.block_row(at, event, addr, &held) };
        self.add_owned(Row { name, category, ..row }, held.stack, phase)?;
        if held.pending { self.free(at, addr, true) } else { Ok(()) }
    }

    /// Writes the free of a block, or the completion of its free. With `pending`, a stream still uses the
    /// block.
    fn free(&mut self, at: &mut Device<'_>, addr: i64, pending: bool) -> io::Result<()> {
        let Some(held) = at.memory.blocks.get(&addr).copied() else {
            self.anomalies.unmatched_frees += 1;
            return Ok(());
        };
        if pending && held.pending {
            return Ok(());
        }
        let Birth { seq, step, phase, category } = at.ids.blocks.get(&addr).copied().unwrap_or_default();
        let event = if held.pending { EventName::FreeCompleted } else { EventName::Free };
        let extent = extent(at, MemoryKind::Block, held.bytes);
        match (held.pending, pending) {
            (true, _) => at.totals.complete(held.bytes),
            (false, true) => at.totals.defer(&extent),
            (false, false) => at.totals.add(&extent.freed()),
        }
        if pending {
            at.memory.blocks.insert(addr, Held { pending, ..held });
        } else {
            at.memory.blocks.remove(&addr);
            at.ids.blocks.remove(&addr);
        }
        let row = self.block_row(at, event, addr, &held);
        let row = Row { alloc_id: seq, delta_bytes: -held.bytes, step, category, ..row };
        self.add_owned(row, held.stack, phase)
    }

    fn block_row(&self, at: &Device<'_>, event: EventName, addr: i64, held: &Held) -> Row<'static> {
        Row {
            addr,
            requested_bytes: held.requested,
            rounded_bytes: self.rounding.round(held.requested as u64) as i64,
            stream: held.stream,
            pool: at.memory.around(addr).map_or(0, |segment| segment.pool),
            ..self.row(at, event, held.stack)
        }
    }

    fn reserve(
        &mut self,
        at: &mut Device<'_>,
        addr: i64,
        reserved: Reserved,
        name: &'static str,
    ) -> io::Result<()> {
        let bytes = reserved.end - addr;
        if bytes <= 0 {
            return Ok(());
        }
        at.totals.add(&extent(at, MemoryKind::Segment, bytes));
        at.memory.reserved.insert(addr, reserved);
        at.ids.reserved.insert(addr, self.seq + 1);
        let event = if reserved.expandable { EventName::SegmentMap } else { EventName::SegmentAlloc };
        let row = Row { alloc_id: -1, delta_bytes: bytes, ..self.segment_row(at, event, addr, &reserved) };
        let is_known = name != LIVE || !StackTable::is_empty(reserved.stack);
        let phase = is_known.then(|| self.snapshot.model.phase(reserved.stack)).flatten();
        self.add_owned(Row { name, ..row }, reserved.stack, phase)
    }

    /// Releases the reserved memory from `start` to `end`. A range that begins before `start` or ends after
    /// `end` is divided.
    fn unreserve(&mut self, at: &mut Device<'_>, start: i64, end: i64) -> io::Result<()> {
        for place in [start, end] {
            let before = at.memory.reserved.range(..place).next_back().map(|(addr, found)| (*addr, *found));
            if let Some((addr, found)) = before.filter(|(_, found)| found.end > place) {
                self.give_back(at, addr, found)?;
                self.reserve(at, addr, Reserved { end: place, ..found }, NONE)?;
                self.reserve(at, place, found, NONE)?;
            }
        }
        let inside: Vec<(i64, Reserved)> =
            at.memory.reserved.range(start..end.max(start)).map(|(addr, found)| (*addr, *found)).collect();
        for (addr, found) in inside {
            self.give_back(at, addr, found)?;
        }
        Ok(())
    }

    fn give_back(&mut self, at: &mut Device<'_>, addr: i64, reserved: Reserved) -> io::Result<()> {
        let bytes = reserved.end - addr;
        at.totals.add(&extent(at, MemoryKind::Segment, bytes).freed());
        at.memory.reserved.remove(&addr);
        let id = at.ids.reserved.remove(&addr).unwrap_or_default();
        let event = if reserved.expandable { EventName::SegmentUnmap } else { EventName::SegmentFree };
        let row = self.segment_row(at, event, addr, &reserved);
        let phase = self.snapshot.model.phase(reserved.stack);
        self.add_owned(Row { alloc_id: id, delta_bytes: -bytes, ..row }, reserved.stack, phase)
    }

    fn segment_row(&self, at: &Device<'_>, event: EventName, addr: i64, reserved: &Reserved) -> Row<'static> {
        let bytes = reserved.end - addr;
        let api = if reserved.expandable { "cuMemMap" } else { "cudaMalloc" };
        Row {
            api,
            addr,
            requested_bytes: bytes,
            rounded_bytes: bytes,
            stream: reserved.stream,
            pool: reserved.pool,
            ..self.row(at, event, reserved.stack)
        }
    }

    /// Corrects the state at the end of the history: frees and allocates blocks until the state matches the
    /// file's segments. This is needed if the history has a gap or contradicts itself.
    fn agree(&mut self, at: &mut Device<'_>) -> io::Result<()> {
        let wanted = Memory::at_end(&self.snapshot.model, at.ordinal);
        let same = |held: &Held, other: Option<&Held>| {
            other.is_some_and(|other| (held.bytes, held.pending) == (other.bytes, other.pending))
        };
        let extra: Vec<i64> = at
            .memory
            .blocks
            .iter()
            .filter(|(addr, held)| !same(held, wanted.blocks.get(addr)))
            .map(|(addr, _)| *addr)
            .collect();
        self.anomalies.gaps += extra.len() as u64;
        for addr in extra {
            self.free(at, addr, false)?;
        }
        // Compare the covered addresses instead of the ranges, because the file may divide mapped memory
        // differently.
        let covers = |from: &Memory, addr: i64, end: i64| {
            let mut at = addr;
            while at < end {
                let Some(found) = from.around(at) else { return false };
                at = found.end;
            }
            true
        };
        let extra: Vec<(i64, i64)> = at
            .memory
            .reserved
            .iter()
            .filter(|(addr, found)| !covers(&wanted, **addr, found.end))
            .map(|(addr, found)| (*addr, found.end))
            .collect();
        self.anomalies.corrections += extra.len() as u64;
        for (addr, end) in extra {
            self.unreserve(at, addr, end)?;
        }
        for (addr, reserved) in &wanted.reserved {
            if !covers(&at.memory, *addr, reserved.end) {
                self.anomalies.corrections += 1;
                self.unreserve(at, *addr, reserved.end)?;
                self.reserve(at, *addr, *reserved, LIVE)?;
            }
        }
        for (addr, held) in &wanted.blocks {
            if !at.memory.blocks.contains_key(addr) {
                self.anomalies.gaps += 1;
                self.alloc(at, *addr, *held, Some(Life::Long))?;
            }
        }
        Ok(())
    }
}

fn extent(at: &Device<'_>, kind: MemoryKind, bytes: i64) -> Extent {
    Extent { device: at.ordinal, kind, in_segment: true, bytes }
}

/// Returns the category of a block at its allocation.
fn category(model: &Model, stack: StackId, phase: Option<Phase>, life: Life, pool: i64) -> Category {
    let owner = model.owners.owner(stack);
    match (phase, life) {
        _ if owner.is_workspace => Category::Workspace,
        _ if model.is_of_graph(pool) => Category::CudaGraph,
        (Some(Phase::Forward), _) => Category::Activation,
        (Some(Phase::Backward), _) if owner.is_recomputed => Category::Activation,
        (Some(Phase::Backward), Life::LongLikeParameter) => Category::Gradient,
        // Frames of C++ show the workspaces, which also outlive a backward.
        (Some(Phase::Backward), Life::Long) if model.owners.has_ops() => Category::Gradient,
        (Some(Phase::Optimizer), Life::Long | Life::LongLikeParameter) => Category::OptimizerState,
        (Some(_), _) => Category::Temporary,
        (None, Life::Parameter) => Category::Parameter,
        (None, _) => Category::None,
    }
}
