//! The column `event`.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// The column `event`.
    EventName {
        /// The caching allocator handed out a block.
        Alloc = "alloc",
        /// A block went back to the allocator.
        Free = "free",
        /// The last stream that used a freed block is done with it.
        FreeCompleted = "free_completed",
        /// The allocator took a segment from CUDA.
        SegmentAlloc = "segment_alloc",
        /// The allocator gave a segment back.
        SegmentFree = "segment_free",
        /// Memory was mapped into an expandable segment.
        SegmentMap = "segment_map",
        /// Memory was unmapped from an expandable segment.
        SegmentUnmap = "segment_unmap",
        /// The allocator gave up on a request.
        Oom = "oom",
        /// Device memory outside torch's allocator.
        ExtAlloc = "ext_alloc",
        /// The same, given back.
        ExtFree = "ext_free",
        /// Pinned host memory.
        HostAlloc = "host_alloc",
        /// The same, given back.
        HostFree = "host_free",
        /// An outermost op ended.
        Op = "op",
        /// A storage that an op reads or writes, or the memory of a module's call.
        Io = "io",
        /// A range opened.
        RangeBegin = "range_begin",
        /// A range closed.
        RangeEnd = "range_end",
        /// A mark.
        Mark = "mark",
        /// A block's owner or category is now known; in pairs, out of the old and into the new.
        Tag = "tag",
        /// What the device shows.
        Sample = "sample",
        /// A block that was live when this part of a rotated trace began.
        Live = "live",
        /// Events were dropped: `name` says how many and why.
        Lost = "lost",
        /// The first row: `name` holds JSON.
        Meta = "meta",
        /// The last row of a complete trace.
        End = "end",
    }
}

impl EventName {
    /// Do the deltas of this event sum to live memory by owner (`groupby` over a prefix of the file)?
    #[must_use]
    pub const fn is_block(self) -> bool {
        matches!(self, EventName::Alloc | EventName::Free | EventName::Tag | EventName::Live)
    }
}
