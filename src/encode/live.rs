//! What is live, and what is told of it.

use memtrace_trace::{Api, Category, EventName};

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
    pub what: MemoryKind,
    /// The call that allocated it; `None` for a byte that no version wrote.
    pub api: Option<Api>,
    /// The text id of the library that made the call; 0 for a report.
    pub library: u32,
    /// The allocator's private pool; 0 for the default.
    pub pool: u16,
}

/// The kinds of memory that a trace tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// A block of torch's allocator.
    Block,
    /// A segment of torch's allocator.
    Segment,
    /// A piece of one of its expandable segments.
    Mapped,
    /// Device memory of others.
    External,
    /// Pinned host memory.
    Host,
}

impl MemoryKind {
    pub(crate) fn events(self) -> (EventName, EventName) {
        match self {
            MemoryKind::Block => (EventName::Alloc, EventName::Free),
            MemoryKind::Segment => (EventName::SegmentAlloc, EventName::SegmentFree),
            MemoryKind::Mapped => (EventName::SegmentMap, EventName::SegmentUnmap),
            MemoryKind::External => (EventName::ExtAlloc, EventName::ExtFree),
            MemoryKind::Host => (EventName::HostAlloc, EventName::HostFree),
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
