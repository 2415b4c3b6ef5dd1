//! The address layout of each device: its segments, the blocks in them and the holes between blocks.
//!
//! A layout is fed the same rows as a replay and places the replay's live blocks into segments. A segment
//! without a known address counts in [`Layout::unplaced`].

use std::collections::BTreeMap;

use memtrace_trace::EventName;

use crate::read::record::{Columns, Record};
use crate::state::replay::{Block, MemoryKind, Replay};

/// The columns that a layout needs in addition to the columns of the replay.
pub const COLUMNS: Columns = Columns::of(&["addr", "stream", "pool", "requested_bytes", "rounded_bytes"]);

/// The size of the segments of the small pool, in bytes.
const SMALL_SEGMENT: i64 = memtrace_trace::rounding::SMALL_SEGMENT as i64;

/// The segments of every device.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// The segments, by device and address.
    segments: BTreeMap<(i32, i64), SegmentRange>,
    /// The reserved bytes of segments whose address is unknown.
    pub unplaced: i64,
    /// For each device and address, the bytes of a piece that was unmapped there and has not been mapped
    /// again.
    unmapped: BTreeMap<(i32, i64), i64>,
    /// The bytes of each block that was freed while a stream still used it, by device and address. No request
    /// can use this memory.
    pending: BTreeMap<(i32, i64), i64>,
    /// The active bytes of each device at its last row of a block.
    active: BTreeMap<i32, i64>,
}

/// The size, the stream and the pool of a segment.
#[derive(Clone, Copy, Debug, Default)]
pub struct SegmentRange {
    /// The size, in bytes.
    pub bytes: i64,
    /// True for an expandable segment, which is mapped piece by piece.
    pub expandable: bool,
    /// The stream of the segment's blocks.
    pub stream: i64,
    /// The allocator's private pool to which the segment belongs; 0 for the default pool.
    pub pool: i64,
}

impl SegmentRange {
    /// Returns true if the segment belongs to the small pool, for requests of at most 1 MiB.
    #[must_use]
    pub fn is_small(&self) -> bool {
        self.bytes == SMALL_SEGMENT && !self.expandable
    }
}

/// A segment with its blocks.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The address of the segment.
    pub addr: i64,
    /// The size, in bytes.
    pub bytes: i64,
    /// True for an expandable segment, which is mapped piece by piece.
    pub expandable: bool,
    /// The allocator's private pool to which the segment belongs; 0 for the default pool.
    pub pool: i64,
    /// The stream of the segment's blocks.
    pub stream: i64,
    /// The segment's blocks, by address.
    pub blocks: Vec<Block>,
    /// The bytes that were freed while a stream still used them.
    pub pending: i64,
    /// The sizes of the holes between the blocks and the pending bytes, in bytes.
    pub holes: Vec<i64>,
}

impl Segment {
    /// Returns the sum of the segment's holes, in bytes.
    #[must_use]
    pub fn free(&self) -> i64 {
        self.holes.iter().sum()
    }

    /// Returns true if neither a block nor a stream uses the segment.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.pending == 0
    }

    /// Returns true if the segment belongs to the small pool, for requests of at most 1 MiB.
    #[must_use]
    pub fn is_small(&self) -> bool {
        SegmentRange { bytes: self.bytes, expandable: self.expandable, ..SegmentRange::default() }.is_small()
    }
}

impl Layout {
    /// Processes the next row.
    pub fn feed(&mut self, row: &Record) {
        if row.status != 0 {
            return;
        }
        self.feed_block(row);
        let key = (row.device, row.addr);
        let (stream, pool) = (row.stream, row.pool);
        let range = |expandable| SegmentRange { bytes: row.delta_bytes, expandable, stream, pool };
        match row.event {
            event if row.addr == 0 && is_segment(event) => self.unplaced += row.delta_bytes,
            EventName::SegmentAlloc => {
                self.segments.insert(key, range(false));
            }
            EventName::SegmentFree if self.segments.remove(&key).is_none() => {
                self.unplaced += row.delta_bytes;
            }
            EventName::SegmentMap => {
                self.unmapped.remove(&key);
                self.map(key, range(true));
            }
            EventName::SegmentUnmap => {
                self.unmapped.insert(key, -row.delta_bytes);
                self.unmap(key, -row.delta_bytes);
            }
            _ => {}
        }
    }

    /// Processes the next row if it is about a block.
    fn feed_block(&mut self, row: &Record) {
        let key = (row.device, row.addr);
        match row.event {
            EventName::Alloc | EventName::Live => {
                // No stream can use the memory under a new block.
                let end = row.addr.saturating_add(row.delta_bytes.max(1));
                let over = self.pending.range((row.device, i64::MIN)..(row.device, end)).rev();
                let over = over.take_while(|((_, addr), bytes)| addr.saturating_add(**bytes) > row.addr);
                for key in over.map(|(key, _)| *key).collect::<Vec<_>>() {
                    self.pending.remove(&key);
                }
            }
            // If the free does not change the active bytes, a stream still uses the block.
            EventName::Free
                if row.delta_bytes != 0 && self.active.get(&row.device) == Some(&row.active_bytes) =>
            {
                self.pending.insert(key, -row.delta_bytes);
            }
            EventName::FreeCompleted => {
                self.pending.remove(&key);
            }
            EventName::Free | EventName::Brief => {}
            _ => return,
        }
        self.active.insert(row.device, row.active_bytes);
    }

    /// Returns true if a stream still uses the freed block at this address.
    #[must_use]
    pub fn is_pending(&self, ordinal: i32, addr: i64) -> bool {
        self.pending.contains_key(&(ordinal, addr))
    }

    /// Adds a mapped piece. Joins it with the adjacent pieces before and after it into one expandable
    /// segment.
    fn map(&mut self, key: (i32, i64), mut new: SegmentRange) {
        let mut start = key;
        if let Some((at, before)) = self.segments.range(..key).next_back()
            && at.0 == key.0
            && before.expandable
            && at.1 + before.bytes == key.1
        {
            start = *at;
            new.bytes += before.bytes;
        }
        let end = (key.0, start.1 + new.bytes);
        if self.segments.get(&end).is_some_and(|after| after.expandable)
            && let Some(after) = self.segments.remove(&end)
        {
            new.bytes += after.bytes;
        }
        self.segments.insert(start, new);
    }

    /// Removes a mapped piece, which may split an expandable segment in two. If no segment has the piece, it
    /// is subtracted from `unplaced`.
    fn unmap(&mut self, key: (i32, i64), bytes: i64) {
        let found = self.segments.range(..=key).next_back().map(|(at, range)| (*at, *range));
        let Some((at, range)) = found.filter(|(at, range)| at.0 == key.0 && key.1 < at.1 + range.bytes)
        else {
            self.unplaced -= bytes;
            return;
        };
        let (end, cut) = (at.1 + range.bytes, key.1 + bytes);
        if key.1 > at.1 {
            self.segments.insert(at, SegmentRange { bytes: key.1 - at.1, ..range });
        } else {
            self.segments.remove(&at);
        }
        if cut < end {
            self.segments.insert((key.0, cut), SegmentRange { bytes: end - cut, ..range });
        }
    }

    /// Returns the segments of a device in order of address.
    pub fn ranges(&self, ordinal: i32) -> impl Iterator<Item = (i64, SegmentRange)> {
        let of_device = (ordinal, i64::MIN)..=(ordinal, i64::MAX);
        self.segments.range(of_device).map(|((_, addr), range)| (*addr, *range))
    }

    /// Returns the start and end of the last segment that begins before `end`.
    fn before(&self, ordinal: i32, end: i64) -> Option<(i64, i64)> {
        let (at, range) = self.segments.range((ordinal, i64::MIN)..(ordinal, end)).next_back()?;
        Some((at.1, at.1.saturating_add(range.bytes)))
    }

    /// Returns true if one segment contains the addresses from `from` to `to`.
    #[must_use]
    pub fn holds(&self, ordinal: i32, from: i64, to: i64) -> bool {
        self.before(ordinal, from.saturating_add(1)).is_some_and(|(_, end)| to <= end)
    }

    /// Returns true if a block's memory was unmapped while the block was live, as by the sleep mode of vLLM.
    #[must_use]
    pub fn is_asleep(&self, block: &Block) -> bool {
        let before = self.unmapped.range(..=(block.device, block.addr)).next_back();
        before.is_some_and(|((device, at), bytes)| {
            *device == block.device && block.addr < at.saturating_add(*bytes)
        }) && !self.touches(block.device, block.addr, block.addr.saturating_add(block.bytes.max(1)))
    }

    /// Returns true if a segment overlaps the addresses from `from` to `to`.
    #[must_use]
    pub fn touches(&self, ordinal: i32, from: i64, to: i64) -> bool {
        self.before(ordinal, to).is_some_and(|(_, end)| end > from)
    }

    /// Returns the segments of a device with the live blocks of `replay`.
    #[must_use]
    pub fn segments(&self, replay: &Replay, ordinal: i32) -> Vec<Segment> {
        let mut blocks: Vec<Block> = replay
            .live()
            .values()
            .filter(|block| block.device == ordinal && block.kind == MemoryKind::Block)
            .copied()
            .collect();
        // If a free row is missing, two blocks have the same address. The id makes their order independent of
        // the hash table.
        blocks.sort_by_key(|block| (block.addr, block.id));
        let mut blocks = blocks.into_iter().peekable();
        let mut segments = Vec::new();
        for ((_, addr), range) in self.segments.range((ordinal, i64::MIN)..=(ordinal, i64::MAX)) {
            // The numbers of a damaged trace may be any.
            let end = addr.saturating_add(range.bytes.max(0));
            while blocks.next_if(|block| block.addr < *addr).is_some() {}
            let mut inside = Vec::new();
            while let Some(block) = blocks.next_if(|block| block.addr < end) {
                inside.push(block);
            }
            let waiting = self.pending.range((ordinal, *addr)..(ordinal, end));
            let waiting: Vec<(i64, i64)> = waiting.map(|((_, addr), bytes)| (*addr, *bytes)).collect();
            let mut used: Vec<(i64, i64)> = inside.iter().map(|block| (block.addr, block.bytes)).collect();
            used.extend(&waiting);
            used.sort_unstable();
            used.push((end, 0));
            let mut holes = Vec::new();
            let mut from = *addr;
            for (start, bytes) in used {
                if start > from {
                    holes.push(start.saturating_sub(from));
                }
                from = from.max(start.saturating_add(bytes));
            }
            let SegmentRange { bytes, expandable, stream, pool } = *range;
            segments.push(Segment {
                addr: *addr,
                bytes,
                expandable,
                pool,
                stream,
                blocks: inside,
                pending: waiting.iter().map(|(_, bytes)| bytes).sum(),
                holes,
            });
        }
        segments
    }
}

/// Returns true for the allocation, free, map or unmap of a segment.
pub(crate) fn is_segment(event: EventName) -> bool {
    use EventName::{SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};
    matches!(event, SegmentAlloc | SegmentFree | SegmentMap | SegmentUnmap)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::memory::Metric;

    use super::*;
    use crate::read::symbols::SymbolTable;
    use crate::state::replay::Window;

    fn row(event: EventName, addr: i64, delta_bytes: i64) -> Record {
        Record { device: 0, event, addr, delta_bytes, ..Record::default() }
    }

    fn shape(layout: &Layout) -> Vec<(i64, i64)> {
        layout.segments.iter().map(|((_, addr), range)| (*addr, range.bytes)).collect()
    }

    #[test]
    fn pieces_of_expandable_segments_join_and_split() {
        let mut layout = Layout::default();
        layout.feed(&row(EventName::SegmentMap, 100, 10));
        layout.feed(&row(EventName::SegmentMap, 120, 10));
        layout.feed(&row(EventName::SegmentMap, 110, 10));
        assert_eq!(shape(&layout), [(100, 30)]);
        layout.feed(&row(EventName::SegmentUnmap, 105, -5));
        assert_eq!(shape(&layout), [(100, 5), (110, 20)]);
        layout.feed(&row(EventName::SegmentUnmap, 110, -20));
        assert_eq!(shape(&layout), [(100, 5)]);
    }

    #[test]
    fn a_freed_block_that_a_stream_uses_is_no_hole_until_its_free_is_complete() {
        let block =
            |event, addr, delta_bytes, active_bytes| Record { active_bytes, ..row(event, addr, delta_bytes) };
        let replay = Replay::new(&SymbolTable::default(), Window::default(), Metric::Allocated);
        let mut layout = Layout::default();
        layout.feed(&row(EventName::SegmentAlloc, 1000, 100));
        layout.feed(&block(EventName::Alloc, 1010, 20, 20));
        layout.feed(&block(EventName::Free, 1010, -20, 20));
        let shape = |layout: &Layout| {
            let segment = layout.segments(&replay, 0).remove(0);
            (segment.pending, segment.holes.clone(), segment.is_empty())
        };
        assert_eq!(shape(&layout), (20, vec![10, 70], false));
        let mut reused = layout.clone();
        reused.feed(&block(EventName::Alloc, 1000, 15, 35));
        layout.feed(&block(EventName::FreeCompleted, 1010, -20, 0));
        for layout in [layout, reused] {
            assert_eq!(shape(&layout), (0, vec![100], true));
        }
    }

    #[test]
    fn adjacent_segments_stay_separate() {
        let mut layout = Layout::default();
        layout.feed(&row(EventName::SegmentAlloc, 100, 10));
        layout.feed(&row(EventName::SegmentAlloc, 110, 10));
        layout.feed(&row(EventName::SegmentFree, 100, -10));
        layout.feed(&row(EventName::SegmentAlloc, 0, 7));
        assert_eq!((shape(&layout), layout.unplaced), (vec![(110, 10)], 7));
    }
}
