//! Live memory, and the owner in its rows.

use memtrace_trace::memory::{Extent, MemoryKind};
use memtrace_trace::{Api, Category, Event, Header};

/// An allocation that is live, with the values of its first row. The row of its free repeats these values.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// The `seq` of the row of the allocation.
    pub alloc_id: i64,
    /// The device; negative for pinned host memory and CPU tensors ([`Event::HOST`], [`Event::CPU`]).
    pub device: i8,
    /// The column `requested_bytes`.
    pub requested: i64,
    /// The column `rounded_bytes`.
    pub rounded: i64,
    /// The size in bytes.
    pub bytes: i64,
    /// The context that owns the memory.
    pub context: u32,
    /// What the memory is used for.
    pub category: Category,
    /// The training step in which it was allocated.
    pub step: i32,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The call that allocated the memory; `None` if the event has a code of no known API, as a damaged
    /// journal may contain.
    pub api: Option<Api>,
    /// The text id of the library that made the call; 0 for a block that torch's allocator reported.
    pub library: u32,
    /// The allocator's private pool; 0 for the default pool.
    pub pool: u16,
    /// The text id of the type and shape of its tensor ([`memtrace_trace::form`]); 0 if unknown.
    pub form: u32,
}

/// The sizes of a block in a report of torch's allocator.
#[derive(Clone, Copy, Debug)]
pub struct BlockSize {
    /// The size in bytes; negative for a free.
    pub bytes: i64,
    /// The bytes that the program requested; -1 if unknown.
    pub requested: i64,
    /// The requested bytes after rounding.
    pub rounded: i64,
}

impl Live {
    /// Returns a block that torch's allocator reports in an event with this header.
    #[inline]
    #[must_use]
    pub fn reported(header: &Header, size: BlockSize, pool: u16) -> Live {
        Live {
            alloc_id: 0,
            device: header.device,
            requested: size.requested,
            rounded: size.rounded,
            bytes: size.bytes.abs(),
            context: header.context,
            category: Category::None,
            step: header.step,
            kind: MemoryKind::Block,
            api: Some(Api::CachingAllocator),
            library: 0,
            pool,
            form: 0,
        }
    }

    /// Returns true if this memory is a block, whether torch reported it or a call allocated it.
    #[inline]
    #[must_use]
    pub fn is_block(&self) -> bool {
        self.kind == MemoryKind::Block
    }

    /// Returns true if this memory is a CPU tensor's.
    #[inline]
    #[must_use]
    pub fn is_cpu_tensor(&self) -> bool {
        self.device == Event::CPU
    }

    /// Returns true if torch's allocator reported this memory.
    #[inline]
    #[must_use]
    pub fn is_reported(&self) -> bool {
        self.api == Some(Api::CachingAllocator)
    }

    /// Returns the size and the kind of the memory, for the totals.
    #[inline]
    #[must_use]
    pub fn extent(&self) -> Extent {
        let kind = self.kind;
        // Pinned memory counts for the host, whichever device the call names.
        let device = if kind == MemoryKind::Host { self.device.min(Event::HOST) } else { self.device.max(0) };
        Extent { device: device.into(), kind, in_segment: self.is_reported(), bytes: self.bytes }
    }
}

/// A request for which torch's allocator found no memory.
pub(crate) struct FailedRequest {
    /// The bytes after rounding.
    pub(crate) bytes: i64,
    /// The bytes that the program requested; -1 if unknown.
    pub(crate) requested: i64,
    /// The private pool of the allocator; 0 for the default pool.
    pub(crate) pool: u16,
    /// The text id of the type and shape of the tensor; 0 if unknown.
    pub(crate) form: u32,
}

/// An OOM that was just encoded.
#[derive(Clone, Copy, Debug)]
pub struct OutOfMemory {
    /// The CUDA ordinal of the device.
    pub device: i8,
    /// The requested bytes, after rounding.
    pub bytes: i64,
    /// The context that requested the memory.
    pub context: u32,
    /// The text id of the type and shape of the tensor; 0 if unknown.
    pub form: u32,
    /// True if the simulated GPU granted the request (`--past-oom`).
    pub is_granted: bool,
}

/// The texts of an owner, as the file contains them.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// The innermost op.
    pub op: &'a str,
    /// The module path.
    pub module: &'a str,
    /// The phase.
    pub phase: &'a str,
}
