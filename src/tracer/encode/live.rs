//! Live memory, and the owner that its rows name.

use memtrace_trace::memory::{Extent, MemoryKind};
use memtrace_trace::{Api, Category, Event};

/// Live memory: the values of its first row, which the row of its free repeats.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// The `seq` of its row.
    pub alloc_id: i64,
    /// The device; -1 for the host.
    pub device: i8,
    /// The column `requested_bytes`.
    pub requested: i64,
    /// The column `rounded_bytes`.
    pub rounded: i64,
    /// The bytes that it takes.
    pub bytes: i64,
    /// The context that owns the memory.
    pub context: u32,
    /// The use of the memory.
    pub category: Category,
    /// The training step of its allocation.
    pub step: i32,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The call that allocated it; `None` for a byte that no version wrote.
    pub api: Option<Api>,
    /// The text id of the library that made the call; 0 for a report.
    pub library: u32,
    /// The allocator's private pool; 0 for the default.
    pub pool: u16,
}

impl Live {
    /// Returns true if this memory is a block: one that torch reported, or the memory of a call.
    #[inline]
    #[must_use]
    pub fn is_block(&self) -> bool {
        self.kind == MemoryKind::Block
    }

    /// Returns true if torch's allocator reported this memory.
    #[inline]
    #[must_use]
    pub fn is_reported(&self) -> bool {
        self.api == Some(Api::CachingAllocator)
    }

    /// The amount of memory.
    #[inline]
    #[must_use]
    pub fn extent(&self) -> Extent {
        let kind = self.kind;
        // Pinned memory counts on the host, whatever device the call names; no other memory does.
        let device = if kind == MemoryKind::Host { Event::HOST } else { self.device.max(0) };
        Extent { device: device.into(), kind, in_segment: self.is_reported(), bytes: self.bytes }
    }
}

/// An OOM that was just encoded.
#[derive(Clone, Copy, Debug)]
pub struct OutOfMemory {
    /// The device.
    pub device: i8,
    /// The rounded request in bytes.
    pub bytes: i64,
    /// The context of the request.
    pub context: u32,
    /// True if the simulated GPU granted the request (`--past-oom`).
    pub is_granted: bool,
}

/// The texts of an owner, as the file has them.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// The innermost op.
    pub op: &'a str,
    /// The module path.
    pub module: &'a str,
    /// The phase.
    pub phase: &'a str,
}
