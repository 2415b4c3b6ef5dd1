//! The column `event`.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// The column `event`.
    EventName {
        /// The caching allocator handed out a block.
        Alloc = "alloc",
        /// A block was returned to the caching allocator.
        Free = "free",
        /// The last stream that used a freed block has finished that use.
        FreeCompleted = "free_completed",
        /// The allocator took a segment from CUDA.
        SegmentAlloc = "segment_alloc",
        /// The allocator returned a segment to CUDA.
        SegmentFree = "segment_free",
        /// Memory was mapped into an expandable segment.
        SegmentMap = "segment_map",
        /// Memory was unmapped from an expandable segment.
        SegmentUnmap = "segment_unmap",
        /// The allocator could not serve a request.
        Oom = "oom",
        /// Device memory was allocated outside torch's allocator.
        ExtAlloc = "ext_alloc",
        /// Device memory outside torch's allocator was freed.
        ExtFree = "ext_free",
        /// Pinned host memory, or a CPU tensor, was allocated.
        HostAlloc = "host_alloc",
        /// Pinned host memory, or a CPU tensor, was freed.
        HostFree = "host_free",
        /// An outermost op ended.
        Op = "op",
        /// A storage that an op reads or writes, or the memory of a module call.
        Io = "io",
        /// A range opened.
        RangeBegin = "range_begin",
        /// A range closed.
        RangeEnd = "range_end",
        /// A point in time that the program marked.
        Mark = "mark",
        /// The owner or category of a block became known. Tags come in pairs: out of the old, into the new.
        Tag = "tag",
        /// A sample of the state of a device.
        Sample = "sample",
        /// A block that was live when this part of a rotated trace began, or when a block of a step without
        /// detail got its row.
        Live = "live",
        /// The change of the sum of the blocks that have no rows of their own, in a step without detail.
        Brief = "brief",
        /// Events were dropped; `name` says how many and why.
        Lost = "lost",
        /// The first row; `name` holds JSON.
        Meta = "meta",
        /// The last row of a complete trace.
        End = "end",
    }
}

impl EventName {
    /// Returns true if the deltas of this event count for the live memory: their sums by owner, from the
    /// start of a file, are the live memory of each owner.
    #[must_use]
    pub const fn is_block(self) -> bool {
        matches!(
            self,
            EventName::Alloc | EventName::Free | EventName::Tag | EventName::Live | EventName::Brief
        )
    }
}
