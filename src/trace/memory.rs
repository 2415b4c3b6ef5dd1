//! Tracks memory: the totals of devices, and the live memory.
//!
//! [`MemoryState`] implements the rules. It has three users: the encoder for live events, the same encoder
//! for the rows of a trace that it resumes, and the analysis for the rows of a trace that it replays. Each
//! user keeps different data about a block and finds blocks by a different key, so it provides its own
//! collections ([`LiveMemory`], [`DeviceTotals`]).

use crate::EventName;

/// The kinds of memory that a trace distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// A block of torch's allocator.
    Block,
    /// A segment of torch's allocator.
    Segment,
    /// A mapped piece of an expandable segment of torch's allocator.
    Mapped,
    /// Device memory outside torch's allocator.
    External,
    /// Host memory: pinned memory and, with `MEMTRACE_HOST_TENSORS`, CPU tensors.
    Host,
}

/// The effect of a row on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Memory was allocated, or is listed at the start of a later part of a rotated trace.
    Alloc,
    /// Memory was freed.
    Free,
    /// The last stream that used a freed block has finished with it.
    Complete,
    /// The bytes of a block move from one owner to another, in two rows.
    Tag,
}

impl MemoryKind {
    /// Returns the event that records an allocation of this kind of memory.
    #[inline]
    #[must_use]
    pub const fn alloc_event(self) -> EventName {
        match self {
            MemoryKind::Block => EventName::Alloc,
            MemoryKind::Segment => EventName::SegmentAlloc,
            MemoryKind::Mapped => EventName::SegmentMap,
            MemoryKind::External => EventName::ExtAlloc,
            MemoryKind::Host => EventName::HostAlloc,
        }
    }

    /// Returns the event that records a free of this kind of memory.
    #[inline]
    #[must_use]
    pub const fn free_event(self) -> EventName {
        match self {
            MemoryKind::Block => EventName::Free,
            MemoryKind::Segment => EventName::SegmentFree,
            MemoryKind::Mapped => EventName::SegmentUnmap,
            MemoryKind::External => EventName::ExtFree,
            MemoryKind::Host => EventName::HostFree,
        }
    }

    /// Returns the kind of memory that rows of `event` are about, and their effect. Returns `None` for rows
    /// that do not change memory.
    #[inline]
    #[must_use]
    pub const fn changed_by(event: EventName) -> Option<(MemoryKind, Effect)> {
        Some(match event {
            EventName::Alloc | EventName::Live => (MemoryKind::Block, Effect::Alloc),
            EventName::Free => (MemoryKind::Block, Effect::Free),
            EventName::FreeCompleted => (MemoryKind::Block, Effect::Complete),
            EventName::Tag => (MemoryKind::Block, Effect::Tag),
            EventName::SegmentAlloc => (MemoryKind::Segment, Effect::Alloc),
            EventName::SegmentFree => (MemoryKind::Segment, Effect::Free),
            EventName::SegmentMap => (MemoryKind::Mapped, Effect::Alloc),
            EventName::SegmentUnmap => (MemoryKind::Mapped, Effect::Free),
            EventName::ExtAlloc => (MemoryKind::External, Effect::Alloc),
            EventName::ExtFree => (MemoryKind::External, Effect::Free),
            EventName::HostAlloc => (MemoryKind::Host, Effect::Alloc),
            EventName::HostFree => (MemoryKind::Host, Effect::Free),
            _ => return None,
        })
    }
}

/// An amount of memory, as the totals count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The CUDA ordinal; -1 for the host, -2 for CPU tensors.
    pub device: i32,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// True for a block inside a segment: the segment counts as reserved, not the block. False for a block of
    /// an allocator that does not cache, because the block is the memory of a runtime call and thus its own
    /// segment.
    pub in_segment: bool,
    /// The size in bytes.
    pub bytes: i64,
}

impl Extent {
    /// Returns the same amount as freed memory.
    #[inline]
    #[must_use]
    pub const fn freed(self) -> Extent {
        Extent { bytes: self.bytes.wrapping_neg(), ..self }
    }

    /// Returns true if the memory counts as reserved.
    #[inline]
    #[must_use]
    pub const fn is_reserved(&self) -> bool {
        match self.kind {
            MemoryKind::Block => !self.in_segment,
            MemoryKind::Segment | MemoryKind::Mapped | MemoryKind::Host => true,
            MemoryKind::External => false,
        }
    }
}

/// The totals of one device, in bytes. On the host, `allocated`, `active` and `reserved` all count the memory
/// of [`MemoryKind::Host`], and the others are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Blocks in use by the program.
    pub allocated: i64,
    /// Blocks in use by the program, and freed blocks that a stream still uses.
    pub active: i64,
    /// Segments.
    pub reserved: i64,
    /// Memory outside torch's allocator.
    pub outside: i64,
    /// Memory in use on the device that no traced call explains (the context, other processes), from the last
    /// sample. Negative if managed memory is on the host; 0 without a sample.
    pub untraced: i64,
}

impl Totals {
    /// Returns the total that a metric shows, in bytes.
    #[must_use]
    pub const fn get(&self, metric: Metric) -> i64 {
        match metric {
            Metric::Allocated => self.allocated,
            Metric::Active => self.active,
            Metric::Reserved => self.reserved,
            Metric::Used => self.reserved.wrapping_add(self.outside).wrapping_add(self.untraced),
        }
    }

    /// Adds memory; negative bytes are a free. The sums wrap, because a damaged trace may contain any
    /// numbers.
    #[inline]
    pub const fn add(&mut self, extent: &Extent) {
        let bytes = extent.bytes;
        match extent.kind {
            MemoryKind::Block | MemoryKind::Host => {
                self.allocated = self.allocated.wrapping_add(bytes);
                self.active = self.active.wrapping_add(bytes);
            }
            MemoryKind::External => self.outside = self.outside.wrapping_add(bytes),
            MemoryKind::Segment | MemoryKind::Mapped => {}
        }
        if extent.is_reserved() {
            self.reserved = self.reserved.wrapping_add(bytes);
        }
    }

    /// Frees a block that streams still use: it remains active.
    #[inline]
    pub const fn defer(&mut self, block: &Extent) {
        self.add(&block.freed());
        self.active = self.active.wrapping_add(block.bytes);
    }

    /// Ends the use of a block that was freed earlier.
    #[inline]
    pub const fn complete(&mut self, bytes: i64) {
        self.active = self.active.wrapping_sub(bytes);
    }

    /// Replaces three totals by the totals in a row. `outside` and `untraced` stay, because rows have no
    /// columns for them: `outside` is the sum of the deltas, and `untraced` comes from samples.
    #[inline]
    pub const fn adopt(&mut self, allocated: i64, active: i64, reserved: i64) {
        *self = Totals { allocated, active, reserved, ..*self };
    }
}

/// One of the totals of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Metric {
    /// Blocks in use by the program.
    Allocated,
    /// Blocks in use by the program, and freed blocks that a stream still uses.
    Active,
    /// Segments held by the allocator.
    Reserved,
    /// All memory in use on the device: segments, device memory outside torch's allocator, and the additional
    /// memory that samples show. Without samples, only the first two, which are then called
    /// [`Metric::UNSAMPLED`].
    Used,
}

impl Metric {
    /// All metrics.
    pub const ALL: [Metric; 4] = [Metric::Allocated, Metric::Active, Metric::Reserved, Metric::Used];

    /// The name of [`Metric::Used`] in reports, for a device without samples.
    pub const UNSAMPLED: &str = "torch and libraries";

    /// Returns the name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Metric::Allocated => "allocated",
            Metric::Active => "active",
            Metric::Reserved => "reserved",
            Metric::Used => "device used",
        }
    }
}

/// The totals of all devices, in the user's collection.
pub trait DeviceTotals {
    /// Returns the totals of a device, which may be new. Device -1 is the host, and -2 has the CPU tensors.
    fn totals_mut(&mut self, device: i32) -> &mut Totals;
}

/// The live memory, in the user's collection.
pub trait LiveMemory {
    /// The key of a piece of memory: an address, or the id of its allocation.
    type Key: Copy;
    /// The data that the user keeps about live memory.
    type Block;
    /// The result of an insertion, such as the memory that was live under the same key.
    type Replaced;
    /// What the user wants to know about a free, passed to [`LiveMemory::remove`].
    type Cause;
    /// The result of a removal, such as the data about the freed memory.
    type Freed;

    /// Adds live memory. Returns what it replaced.
    fn insert(&mut self, key: Self::Key, block: Self::Block) -> Self::Replaced;

    /// Removes memory. Returns `None` if no memory is live under the key.
    fn remove(&mut self, key: Self::Key, cause: Self::Cause) -> Option<Self::Freed>;
}

/// The memory of one process.
#[derive(Clone, Default)]
pub struct MemoryState<L, D> {
    /// The live memory.
    pub live: L,
    /// The devices with their totals.
    pub devices: D,
}

impl<L: LiveMemory, D: DeviceTotals> MemoryState<L, D> {
    /// Adds allocated memory. Returns the result of [`LiveMemory::insert`].
    #[inline]
    pub fn alloc(&mut self, extent: &Extent, key: L::Key, block: L::Block) -> L::Replaced {
        self.count(extent);
        self.live.insert(key, block)
    }

    /// Frees memory. `extent` computes the freed amount. It gets the removed memory, or `None` if no memory
    /// was live under `key`.
    #[inline]
    pub fn free(
        &mut self,
        key: L::Key,
        cause: L::Cause,
        extent: impl FnOnce(Option<&L::Freed>) -> Extent,
    ) -> Option<L::Freed> {
        let freed = self.live.remove(key, cause);
        self.count(&extent(freed.as_ref()).freed());
        freed
    }

    /// Frees a block that streams still use. The caller keeps the block until [`MemoryState::complete`].
    #[inline]
    pub fn free_deferred(&mut self, key: L::Key, cause: L::Cause, block: &Extent) -> Option<L::Freed> {
        self.devices.totals_mut(block.device).defer(block);
        self.live.remove(key, cause)
    }

    /// Ends the use of a deferred block by its last stream.
    #[inline]
    pub fn complete(&mut self, device: i32, bytes: i64) {
        self.devices.totals_mut(device).complete(bytes);
    }

    /// Counts memory without a key: a row that names no allocation, or a block whose owner changes.
    #[inline]
    pub fn count(&mut self, extent: &Extent) {
        self.devices.totals_mut(extent.device).add(extent);
    }

    /// Replaces the allocated total by the total that the allocator reported. Returns the difference. It is
    /// not 0 if reports were lost.
    #[inline]
    pub fn correct_allocated(&mut self, device: i32, reported: i64) -> i64 {
        let totals = self.devices.totals_mut(device);
        let gap = reported.wrapping_sub(totals.allocated);
        totals.allocated = reported;
        totals.active = totals.active.wrapping_add(gap);
        gap
    }

    /// Replaces the reserved total by the total that the allocator reported. Returns the difference. It is
    /// not 0 if calls were not seen.
    #[inline]
    pub fn correct_reserved(&mut self, device: i32, reported: i64) -> i64 {
        let totals = self.devices.totals_mut(device);
        let gap = reported.wrapping_sub(totals.reserved);
        totals.reserved = reported;
        gap
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// The totals of two devices and of the host.
    #[derive(Default)]
    struct Devices([Totals; 3]);

    impl DeviceTotals for Devices {
        fn totals_mut(&mut self, device: i32) -> &mut Totals {
            &mut self.0[(device + 1) as usize]
        }
    }

    impl LiveMemory for HashMap<u64, Extent> {
        type Key = u64;
        type Block = Extent;
        type Replaced = Option<Extent>;
        type Cause = ();
        type Freed = Extent;

        fn insert(&mut self, key: u64, block: Extent) -> Option<Extent> {
            HashMap::insert(self, key, block)
        }

        fn remove(&mut self, key: u64, (): ()) -> Option<Extent> {
            HashMap::remove(self, &key)
        }
    }

    type State = MemoryState<HashMap<u64, Extent>, Devices>;

    fn extent(kind: MemoryKind, bytes: i64) -> Extent {
        let device = if kind == MemoryKind::Host { -1 } else { 0 };
        Extent { device, kind, in_segment: kind == MemoryKind::Block, bytes }
    }

    fn totals(allocated: i64, active: i64, reserved: i64, outside: i64) -> Totals {
        Totals { allocated, active, reserved, outside, untraced: 0 }
    }

    #[test]
    fn every_kind_of_memory_counts_in_its_totals_and_leaves_nothing_behind() {
        use MemoryKind::{Block, External, Host, Mapped, Segment};
        let cases = [
            (Block, totals(8, 8, 0, 0)),
            (Segment, totals(0, 0, 8, 0)),
            (Mapped, totals(0, 0, 8, 0)),
            (External, totals(0, 0, 0, 8)),
            (Host, totals(8, 8, 8, 0)),
        ];
        for (kind, expected) in cases {
            let mut state = State::default();
            let extent = extent(kind, 8);
            assert_eq!(state.alloc(&extent, 1, extent), None);
            assert_eq!(*state.devices.totals_mut(extent.device), expected, "{kind:?}");
            assert_eq!(state.free(1, (), |live| *live.unwrap()), Some(extent));
            assert_eq!(*state.devices.totals_mut(extent.device), Totals::default(), "{kind:?}");
            assert_eq!(MemoryKind::changed_by(kind.alloc_event()), Some((kind, Effect::Alloc)));
            assert_eq!(MemoryKind::changed_by(kind.free_event()), Some((kind, Effect::Free)));
        }
        let mut own_segment = Totals::default();
        own_segment.add(&Extent { in_segment: false, ..extent(Block, 8) });
        assert_eq!(own_segment, totals(8, 8, 8, 0));
    }

    #[test]
    fn a_block_that_streams_still_use_stays_active_until_they_are_done() {
        let mut state = State::default();
        let block = extent(MemoryKind::Block, 8);
        state.alloc(&block, 1, block);
        assert_eq!(state.free_deferred(1, (), &block), Some(block));
        assert_eq!(*state.devices.totals_mut(0), totals(0, 8, 0, 0));
        state.complete(0, 8);
        assert_eq!(*state.devices.totals_mut(0), Totals::default());
    }

    #[test]
    fn the_totals_of_the_allocator_replace_the_sums() {
        let mut state = State::default();
        let (block, external) = (extent(MemoryKind::Block, 8), extent(MemoryKind::External, 3));
        state.alloc(&block, 1, block);
        state.count(&external);
        assert_eq!((state.correct_allocated(0, 10), state.correct_allocated(0, 10)), (2, 0));
        assert_eq!((state.correct_reserved(0, 32), state.correct_reserved(0, 32)), (32, 0));
        assert_eq!(*state.devices.totals_mut(0), totals(10, 10, 32, 3));
        state.devices.totals_mut(0).adopt(1, 2, 4);
        assert_eq!(*state.devices.totals_mut(0), totals(1, 2, 4, 3));
        state.devices.totals_mut(0).untraced = 16;
        state.devices.totals_mut(0).adopt(1, 2, 8);
        assert_eq!(state.devices.totals_mut(0).get(Metric::Used), 8 + 3 + 16);
    }
}
