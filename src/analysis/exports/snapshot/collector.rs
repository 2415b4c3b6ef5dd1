//! Collects the entries and segments of a snapshot from the rows.

use std::collections::{BTreeMap, VecDeque};

use memtrace_trace::meta::Meta;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::layout::{Layout, SegmentRange};
use crate::state::replay::{Block, MemoryKind, Replay, is_gpu};

/// The maximum length of [`Collector::new_segments`]. Normally, the row of a segment's first block comes
/// directly after the row of the segment, so the list stays short.
const MOST_NEW_SEGMENTS: usize = 256;

/// The owner of an entry or block: op, module, phase, step, and the stack with the Python lines if the trace
/// has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FrameOwner {
    pub(super) op: Symbol,
    pub(super) module: Symbol,
    pub(super) phase: Symbol,
    pub(super) step: i64,
    pub(super) stack: i64,
}

impl FrameOwner {
    fn from_row(row: &Record) -> FrameOwner {
        FrameOwner { op: row.op, module: row.module, phase: row.phase, step: row.step, stack: row.stack_id }
    }
}

/// One entry of the snapshot's trace.
pub(super) struct TraceEntry {
    pub(super) action: &'static str,
    pub(super) device: i32,
    /// The address or, for an OOM, the free bytes of the device.
    pub(super) addr: i64,
    pub(super) size: i64,
    pub(super) stream: i64,
    pub(super) ts_ns: i64,
    pub(super) owner: FrameOwner,
    /// For blocks, the `alloc_id` and the category of the row.
    pub(super) block: Option<(i64, Category)>,
}

/// A block in use.
#[derive(Clone, Copy)]
pub(super) struct ActiveBlock {
    pub(super) addr: i64,
    pub(super) bytes: i64,
    pub(super) requested: i64,
    pub(super) stream: i64,
    pub(super) pool: i64,
    /// True if the block was freed but another stream still uses it.
    pub(super) pending: bool,
    pub(super) owner: FrameOwner,
}

impl ActiveBlock {
    fn from_block(block: &Block) -> ActiveBlock {
        let owner = block.owner;
        ActiveBlock {
            addr: block.addr,
            bytes: block.bytes,
            requested: block.requested,
            stream: block.stream,
            pool: block.pool,
            pending: false,
            owner: FrameOwner {
                op: owner.op,
                module: owner.module,
                phase: owner.phase,
                step: owner.step,
                stack: block.stack,
            },
        }
    }
}

/// The owner and the stream of a segment. The stream is taken from the segment's first block.
#[derive(Clone, Copy)]
pub(super) struct SegmentOwner {
    pub(super) owner: FrameOwner,
    pub(super) stream: i64,
}

/// One segment of the snapshot.
pub(super) struct SnapshotSegment {
    pub(super) device: i32,
    pub(super) addr: i64,
    pub(super) range: SegmentRange,
    pub(super) segment_owner: Option<SegmentOwner>,
    pub(super) blocks: Vec<ActiveBlock>,
}

/// The collected content of a snapshot.
pub(super) struct Collector {
    pub(super) layout: Layout,
    /// The maximum number of entries to keep.
    pub(super) most: usize,
    pub(super) only: Option<i32>,
    pub(super) meta: Meta,
    pub(super) entries: VecDeque<TraceEntry>,
    pub(super) dropped: u64,
    /// The blocks that were freed but are still in use, by device and address.
    pub(super) pending: BTreeMap<(i32, i64), ActiveBlock>,
    /// The owner and stream of each segment, or of each piece of an expandable segment, by device and
    /// address.
    pub(super) segment_owners: FxHashMap<(i32, i64), SegmentOwner>,
    /// The segments that have no block yet: device, start and end. Their rows have no stream, because the
    /// allocator reports the block that needs a segment only after the call that allocates the segment.
    pub(super) new_segments: Vec<(i32, i64, i64)>,
    /// The address ranges of blocks outside all known segments, by device.
    pub(super) stray_ranges: BTreeMap<i32, BTreeMap<i64, i64>>,
}

impl Collector {
    pub(super) fn new(most: usize, only: Option<i32>, meta: &Meta) -> Collector {
        Collector {
            layout: Layout::default(),
            most,
            only,
            meta: meta.clone(),
            entries: VecDeque::new(),
            dropped: 0,
            pending: BTreeMap::new(),
            segment_owners: FxHashMap::default(),
            new_segments: Vec::new(),
            stray_ranges: BTreeMap::new(),
        }
    }

    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if !is_gpu(row.device) || self.only.is_some_and(|only| only != row.device) {
            return;
        }
        self.layout.feed(row);
        if row.event == EventName::Alloc {
            self.assign_stream(row);
            self.complete_pending(row, replay.in_window());
        }
        let now = replay.find(row.device).map(|device| device.totals).unwrap_or_default();
        let inside = replay.in_window();
        let size = if row.requested_bytes < 0 { row.delta_bytes.abs() } else { row.requested_bytes };
        let key = (row.device, row.addr);
        // The row that frees a segment has no stream, so use the stream of the segment.
        let stream = match row.event {
            EventName::SegmentFree | EventName::SegmentUnmap => {
                self.segment_owners.get(&key).map_or(row.stream, |segment_owner| segment_owner.stream)
            }
            _ => row.stream,
        };
        let (device, ts_ns, owner) = (row.device, row.ts_ns, FrameOwner::from_row(row));
        let new = |action, addr, size, block| TraceEntry {
            action,
            device,
            addr,
            size,
            stream,
            ts_ns,
            owner,
            block,
        };
        let block = Some((row.alloc_id, row.category));
        match row.event {
            EventName::Alloc | EventName::Live => {
                self.push(inside, new("alloc", row.addr, size, block));
                self.record_stray(row);
            }
            EventName::Free => {
                self.push(inside, new("free_requested", row.addr, size, block));
                if self.layout.is_pending(row.device, row.addr) {
                    let active = ActiveBlock {
                        addr: row.addr,
                        bytes: -row.delta_bytes,
                        requested: row.requested_bytes,
                        stream: row.stream,
                        pool: row.pool,
                        pending: true,
                        owner: FrameOwner::from_row(row),
                    };
                    self.pending.insert(key, active);
                } else {
                    self.push(inside, new("free_completed", row.addr, size, block));
                }
            }
            EventName::FreeCompleted => {
                let pending = self.pending.remove(&key);
                if pending.is_some() {
                    self.push(inside, new("free_completed", row.addr, size, block));
                }
            }
            EventName::Oom => {
                // The viewer needs a number for the free memory. If the row has no measured value, use the
                // card's memory minus the reserved memory and the memory outside torch's allocator.
                let most = (self.meta.total_bytes(row.device) - now.reserved - now.outside).max(0);
                let free = if row.device_free_bytes >= 0 { row.device_free_bytes } else { most };
                self.push(inside, new("oom", free, row.rounded_bytes, None));
            }
            _ if row.status != 0 || row.addr == 0 => {}
            EventName::SegmentAlloc | EventName::SegmentMap => {
                let action = if row.event == EventName::SegmentMap { "segment_map" } else { "segment_alloc" };
                self.push(inside, new(action, row.addr, row.delta_bytes, None));
                self.segment_owners.insert(key, SegmentOwner { owner: FrameOwner::from_row(row), stream });
                if self.new_segments.len() == MOST_NEW_SEGMENTS {
                    self.new_segments.remove(0);
                }
                self.new_segments.push((row.device, row.addr, row.addr.saturating_add(row.delta_bytes)));
            }
            EventName::SegmentFree | EventName::SegmentUnmap => {
                let action =
                    if row.event == EventName::SegmentUnmap { "segment_unmap" } else { "segment_free" };
                self.push(inside, new(action, row.addr, -row.delta_bytes, None));
                self.segment_owners.remove(&key);
            }
            _ => {}
        }
    }

    /// Adds the next entry if it is in the window, and drops the oldest entry if there are too many.
    fn push(&mut self, inside: bool, entry: TraceEntry) {
        if !inside {
            return;
        }
        if self.entries.len() == self.most {
            self.entries.pop_front();
            self.dropped += 1;
        }
        self.entries.push_back(entry);
    }

    /// Completes the pending frees of the blocks that a new block overlaps, because no stream can use that
    /// memory anymore.
    fn complete_pending(&mut self, row: &Record, inside: bool) {
        let end = row.addr.saturating_add(row.delta_bytes.max(1));
        let over = self.pending.range((row.device, i64::MIN)..(row.device, end)).rev();
        let over = over.take_while(|(_, block)| block.addr.saturating_add(block.bytes) > row.addr);
        let over: Vec<(i32, i64)> = over.map(|(key, _)| *key).collect();
        for key in over.into_iter().rev() {
            let Some(block) = self.pending.remove(&key) else { continue };
            let ActiveBlock { addr, stream, owner, .. } = block;
            let (action, device, size) = ("free_completed", row.device, block.requested_or_size());
            // The entry needs no category, because the other rows of the block have it.
            let block = None;
            self.push(
                inside,
                TraceEntry { action, device, addr, size, stream, ts_ns: row.ts_ns, owner, block },
            );
        }
    }

    /// Sets the stream of the new segments that the block in `row` overlaps. This block is their first one.
    fn assign_stream(&mut self, row: &Record) {
        let end = row.addr.saturating_add(row.delta_bytes);
        let (segment_owners, entries) = (&mut self.segment_owners, &mut self.entries);
        self.new_segments.retain(|(device, from, to)| {
            if *device != row.device || *to <= row.addr || end <= *from {
                return true;
            }
            if let Some(segment_owner) = segment_owners.get_mut(&(*device, *from)) {
                segment_owner.stream = row.stream;
            }
            let just = entries.iter_mut().rev().take_while(|entry| entry.action.starts_with("segment"));
            for entry in just.filter(|entry| entry.device == *device && entry.addr == *from) {
                entry.stream = row.stream;
            }
            false
        });
    }

    /// Records the address range of a block outside all known segments.
    fn record_stray(&mut self, row: &Record) {
        let end = row.addr.saturating_add(row.delta_bytes.max(0));
        if self.layout.holds(row.device, row.addr, end) {
            return;
        }
        let stray_ranges = self.stray_ranges.entry(row.device).or_default();
        let (mut from, mut to) = (row.addr, end);
        // Merge the new range with adjacent ranges.
        while let Some((start, stop)) = stray_ranges
            .range(..=to)
            .next_back()
            .map(|(start, stop)| (*start, *stop))
            .filter(|(_, stop)| *stop >= from)
        {
            stray_ranges.remove(&start);
            (from, to) = (from.min(start), to.max(stop));
        }
        stray_ranges.insert(from, to);
    }

    /// Returns the segments with their blocks. All returned blocks are inside a segment and do not overlap,
    /// even if the rows contradict each other.
    pub(super) fn segments(&mut self, replay: &Replay) -> Vec<SnapshotSegment> {
        let mut active: BTreeMap<i32, Vec<ActiveBlock>> = BTreeMap::new();
        for block in
            replay.live().values().filter(|block| block.kind == MemoryKind::Block && is_gpu(block.device))
        {
            active.entry(block.device).or_default().push(ActiveBlock::from_block(block));
        }
        for ((device, _), block) in &self.pending {
            active.entry(*device).or_default().push(*block);
        }
        let devices: Vec<i32> = replay.devices().iter().map(|device| device.ordinal).collect();
        let mut segments = Vec::new();
        for device in devices.into_iter().filter(|device| is_gpu(*device)) {
            if self.only.is_some_and(|only| only != device) {
                continue;
            }
            let mut ranges: BTreeMap<i64, SegmentRange> = self.layout.ranges(device).collect();
            for (from, to) in self.stray_ranges.get(&device).into_iter().flatten() {
                // A known segment may cover an earlier stray range.
                if !self.layout.touches(device, *from, *to) {
                    ranges.insert(
                        *from,
                        SegmentRange { bytes: to.saturating_sub(*from), ..SegmentRange::default() },
                    );
                }
            }
            let mut blocks = active.remove(&device).unwrap_or_default();
            blocks.sort_by_key(|block| block.addr);
            let mut blocks = blocks.into_iter().peekable();
            for (addr, range) in ranges {
                let end = addr.saturating_add(range.bytes);
                let mut inside: Vec<ActiveBlock> = Vec::new();
                while let Some(block) = blocks.next_if(|block| block.addr < end) {
                    let from = inside.last().map_or(addr, |last: &ActiveBlock| last.addr + last.bytes);
                    // A trace that contradicts itself may have overlapping blocks.
                    if block.addr >= from && block.bytes > 0 && block.addr.saturating_add(block.bytes) <= end
                    {
                        inside.push(block);
                    }
                }
                let segment_owner = self.segment_owners.get(&(device, addr)).copied();
                segments.push(SnapshotSegment { device, addr, range, segment_owner, blocks: inside });
            }
        }
        segments
    }
}

impl ActiveBlock {
    /// Returns the requested size, or the block's size if the requested size is unknown.
    pub(super) fn requested_or_size(&self) -> i64 {
        if self.requested < 0 { self.bytes } else { self.requested.min(self.bytes) }
    }
}
