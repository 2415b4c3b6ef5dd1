//! The effects of rows on memory: allocations, frees, tags, samples, and the totals of each row.

use memtrace_trace::columns::MAX_BYTES;
use memtrace_trace::memory::{Extent, MemoryKind, Metric};
use memtrace_trace::sample::Sample;
use memtrace_trace::{Category, EventName};

use super::{HOST, Replay, is_gpu};
use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::block::{Block, Death, Owner};
use crate::state::categories::is_from_outside;
use crate::state::device::Peak;
use crate::state::live_blocks::FreedSlot;

impl Replay {
    /// Starts the search for peaks at `row`, the first row of the window. The totals before the row are the
    /// first candidates.
    pub(super) fn enter_window(&mut self, row: &Record) {
        let (seq, ts_ns) = (self.seq, row.ts_ns);
        for device in &mut self.memory.devices.list {
            for metric in Metric::ALL {
                device.raise(metric, seq, ts_ns, Owner::from_row(row), self.tracked);
            }
        }
    }

    /// Sets the totals from a row, and updates the peaks.
    pub(super) fn totals(&mut self, row: &Record) {
        let (tracked, inside) = (self.tracked, self.inside);
        let device = self.memory.devices.device(row.device);
        let mut totals = device.summed;
        totals.adopt(row.allocated_bytes, row.active_bytes, row.reserved_bytes);
        device.totals = totals;
        if inside {
            for metric in Metric::ALL {
                if totals.get(metric) > device.peaks[metric as usize].bytes {
                    device.raise(metric, row.seq, row.ts_ns, Owner::from_row(row), tracked);
                }
            }
        }
        if self.checks {
            self.compare(row);
        }
    }

    /// Processes a sample of a device.
    pub(super) fn sample(&mut self, row: &Record) {
        // In a replay, the device `HOST` has only pinned host memory. A host sample counts the whole memory
        // of the process, so it is no sample of that device.
        if row.device == HOST {
            return;
        }
        let sample = Sample::parse(&self.symbols.get(row.name));
        let owner = Owner { step: self.step, phase: self.phase, ..Peak::default().owner };
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
        let is_above = row.device >= 0 && totals.allocated > totals.reserved && self.counts.lost == 0;
        let was_above = std::mem::replace(&mut device.is_above, is_above);
        // In a sleep mode, segments are unmapped while their blocks stay live. It is then correct that more
        // memory is allocated than reserved. So count a problem only if this begins at an allocation.
        if is_above && !was_above && row.event == EventName::Alloc {
            self.problems.above_reserved += 1;
            self.problems.example(|| {
                format!(
                    "seq {}, device {}: {} allocated, and only {} reserved",
                    row.seq, row.device, totals.allocated, totals.reserved
                )
            });
        }
        // After a wrong total, all later totals are wrong by the same amount, so only the row at which the
        // difference changes is a problem. The opening rows of a rotated part are no problem, because the
        // sums are still incomplete there.
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

    /// Returns the memory that a row describes. The bytes of a free are negative.
    pub(super) fn extent(&self, row: &Record, kind: MemoryKind) -> Extent {
        // Without caching, a block is its own segment.
        let in_segment = row.api == self.caching_allocator;
        Extent { device: row.device, kind, in_segment, bytes: row.delta_bytes }
    }

    pub(super) fn alloc(&mut self, row: &Record, kind: MemoryKind) {
        if kind == MemoryKind::Block && row.event != EventName::Live {
            self.last_alloc = row.seq;
        }
        if is_gpu(row.device) && self.oom_step.is_some_and(|step| step < self.highest_step) {
            self.oom_step = None;
        }
        self.insert(row, kind);
        self.totals(row);
    }

    /// Adds the block that a row allocates, if the row names one.
    fn insert(&mut self, row: &Record, kind: MemoryKind) {
        if row.alloc_id != 0 {
            let block = Block {
                kind,
                device: row.device,
                id: row.alloc_id,
                born_ns: row.ts_ns,
                bytes: row.delta_bytes,
                // The requested size of a row may exceed any real memory. The limit keeps sums within 64
                // bits.
                requested: row.requested_bytes.min(MAX_BYTES.cast_signed()),
                rounded: row.rounded_bytes.min(MAX_BYTES.cast_signed()),
                addr: row.addr,
                stream: row.stream,
                pool: row.pool,
                stack: row.stack_id,
                dtype: row.dtype,
                shape: row.shape,
                owner: Owner::from_row(row),
                then: None,
                pass: self.passes.begun,
                died: None,
                managed: kind == MemoryKind::External && self.managed_calls.contains(&row.api),
                inferred: self.is_snapshot && row.category != Category::None,
                predates: self.is_snapshot && row.event == EventName::Live && row.category == Category::None,
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
                if self.checks && row.event == EventName::Alloc {
                    self.place(row);
                }
            }
        }
    }

    /// Records the address range of a new block, and counts a problem if another block is live there.
    fn place(&mut self, row: &Record) {
        let end = row.addr.saturating_add(row.delta_bytes);
        if row.delta_bytes <= 0 || row.addr == 0 {
            return;
        }
        let before = self.places.range((row.device, i64::MIN)..(row.device, end)).next_back();
        if let Some(((_, addr), (_, id))) = before.filter(|(_, (other, _))| *other > row.addr) {
            let (addr, id) = (*addr, *id);
            self.problems.overlaps += 1;
            self.problems.example(|| {
                format!(
                    "seq {}: a block at {:#x}, where block {id} is live from {addr:#x} on",
                    row.seq, row.addr
                )
            });
        }
        self.places.insert((row.device, row.addr), (end, row.alloc_id));
    }

    /// Processes a `brief` row. The blocks of a device without rows of their own are one block here, which
    /// each such row replaces.
    pub(super) fn brief(&mut self, row: &Record) {
        let row = &Record {
            api: self.caching_allocator,
            alloc_id: row.seq,
            op: Symbol::WITHOUT_DETAIL,
            module: Symbol::WITHOUT_DETAIL,
            ..*row
        };
        let id = std::mem::replace(&mut self.memory.devices.device(row.device).brief, row.seq);
        let before = self.memory.live.get_mut(id).map_or(0, |block| block.bytes);
        if before != 0 {
            self.remove(
                &Record { alloc_id: id, delta_bytes: before.wrapping_neg(), ..*row },
                MemoryKind::Block,
            );
            self.freed = None;
        }
        let bytes = before.wrapping_add(row.delta_bytes);
        if bytes != 0 {
            // As an opening row: the block does not count as an allocation.
            self.insert(&Record { delta_bytes: bytes, event: EventName::Live, ..*row }, MemoryKind::Block);
        }
        self.totals(row);
    }

    /// Returns true if blocks without rows of their own are live.
    #[must_use]
    pub(crate) fn has_brief_blocks(&self) -> bool {
        self.memory
            .devices
            .list
            .iter()
            .any(|device| device.brief != 0 && self.memory.live.contains(device.brief))
    }

    pub(super) fn free(&mut self, row: &Record, kind: MemoryKind) {
        self.remove(row, kind);
        self.totals(row);
    }

    /// Removes the block that a row frees, if the row names one.
    fn remove(&mut self, row: &Record, kind: MemoryKind) {
        if row.alloc_id != 0 {
            let (extent, death) = (
                self.extent(row, kind),
                Death { seq: row.seq, step: self.step, phase: self.phase, pass: self.passes.begun },
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
    }

    /// Updates the state after a block was freed: its address range, its device's counts, the backward passes
    /// and the blocks of the peak.
    fn account_freed(&mut self, row: &Record, freed: FreedSlot) {
        let Some(block) = self.memory.live.removed(freed) else { return };
        let (id, device, bytes, place) = (block.id, block.device, block.bytes, (block.device, block.addr));
        if self.places.get(&place).is_some_and(|(_, live)| *live == id) {
            self.places.remove(&place);
        }
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

    /// Adds the bytes of a freed block without an owner to both sums, `all` and `inferred`. Which of them
    /// applies is known only at the end of the trace, when it is clear whether the trace has tags.
    #[cold]
    fn count_unowned(&mut self, mut block: Block) {
        self.infer_categories(std::slice::from_mut(&mut block), i64::MAX);
        let unowned = &mut self.memory.devices.device(block.device).unowned;
        unowned.all = unowned.all.wrapping_add(block.bytes);
        if !block.owner.is_nobody() {
            unowned.inferred = unowned.inferred.wrapping_add(block.bytes);
        }
    }

    /// Processes a `tag` row. Tags come in pairs: a row with negative bytes for the old owner, then a row for
    /// the new owner.
    pub(super) fn tag(&mut self, row: &Record) {
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
        block.owner = Owner::from_row(row);
        (block.dtype, block.shape) = (row.dtype, row.shape);
    }
}
