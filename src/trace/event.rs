//! The small fixed-size value that flows from a hook to the writer thread.
//!
//! A hook fills one and stores it; it looks nothing up, numbers nothing and formats nothing. Fields
//! are raw integers, because an event is also read back from the journal of a process that was
//! killed, where any byte may stand.

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Fills the end of a chunk; carries nothing.
    Pad = 0,
    /// `c10::reportMemoryUsageToProfiler`: `size` is signed, `allocated` and `reserved` are the
    /// allocator's totals, `extra` the requested bytes or -1.
    Block = 1,
    /// `c10::reportOutOfMemoryToProfiler`: `size` is the rounded request.
    OutOfMemory = 2,
    /// A call that takes device memory returned: `status`, `extra` is its latency in ns, `size` what it gave,
    /// `allocated` what it was asked for (0 for the same; of a mapping, the physical memory).
    DeviceAlloc = 3,
    /// A call that gives device memory back: `clock_ns` is from before the call.
    DeviceFree = 4,
    /// As `DeviceAlloc`, pinned host memory.
    HostAlloc = 5,
    /// As `DeviceFree`, pinned host memory.
    HostFree = 6,
    /// A range opened: `extra` is the id of its name.
    RangeBegin = 7,
    /// A range closed: `extra` is the id of its name.
    RangeEnd = 8,
    /// A mark: `extra` is the id of its text.
    Mark = 9,
    /// A text: `addr` is its id, `size` its length in bytes; the text fills the slots behind it.
    DefineText = 10,
    /// A context: `addr` is its id, `size` the text id of the op, `allocated` of the module,
    /// `reserved` of the phase, `extra` the stack id, `clock_ns` the stream; `flags` as the context's.
    DefineContext = 11,
    /// The outermost op of a thread ended: `size` is its net bytes, `extra` its duration in ns, `reserved` the
    /// text id of its overload.
    Op = 12,
    /// `size` events of this thread were dropped.
    Lost = 13,
    /// The last use of a block freed earlier is over: `addr`.
    FreeCompleted = 14,
    /// A stack: `addr` is its id, `size` the id of the stack around it, `extra` the text id of the op.
    DefineStack = 15,
    /// What a block is for is known now: `addr`, `size` is the index of its category, `extra` the text id
    /// of the module that owns it (0 for none), `reserved` of its name there.
    Tag = 16,
    /// An op uses a storage: `addr`, `size` is the storage's bytes, `api` how. Or a module's call has memory:
    /// `size` is its bytes, `reserved` the same rounded, `api` which.
    Io = 17,
    /// A look at `device`, in bytes, -1 for unknown: `addr` is its memory, `size` what is free, `allocated` what
    /// this process has, `reserved` what others have, `extra` what of BAR1 is in use.
    Sample = 18,
    /// As `Sample`: `size` is what the memory pool holds, `allocated` what of it is given out, `reserved` what
    /// CUDA graphs hold.
    SamplePools = 19,
}

const KINDS: &[Kind] = &[
    Kind::Pad,
    Kind::Block,
    Kind::OutOfMemory,
    Kind::DeviceAlloc,
    Kind::DeviceFree,
    Kind::HostAlloc,
    Kind::HostFree,
    Kind::RangeBegin,
    Kind::RangeEnd,
    Kind::Mark,
    Kind::DefineText,
    Kind::DefineContext,
    Kind::Op,
    Kind::Lost,
    Kind::FreeCompleted,
    Kind::DefineStack,
    Kind::Tag,
    Kind::Io,
    Kind::Sample,
    Kind::SamplePools,
];

/// One event: a cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Event {
    /// `CLOCK_MONOTONIC`, ns, read inside the hook (so under the allocator's mutex).
    pub clock_ns: u64,
    /// A [`Kind`].
    pub kind: u8,
    /// An [`crate::Api`].
    pub api: u8,
    /// The CUDA ordinal; [`Event::HOST`] for the host, [`Event::UNKNOWN_DEVICE`] when only the
    /// address can tell.
    pub device: i8,
    /// Per kind; 0 when unused. See [`Event::DEFERRED`], [`Event::FROM_TORCH_ALLOCATOR`].
    pub flags: u8,
    /// The call's return code.
    pub status: i16,
    /// The allocator's private pool (blocks); 0 for the default.
    pub source: u16,
    /// The address.
    pub addr: u64,
    /// Bytes; signed for blocks.
    pub size: i64,
    /// Bytes the allocator handed out on this device, after the event.
    pub allocated: u64,
    /// Bytes the allocator holds on this device, after the event.
    pub reserved: u64,
    /// The id of the interned context: op, module, phase.
    pub context: u32,
    /// The training step; -1 before the first.
    pub step: i32,
    /// Per kind: requested bytes, a latency in ns, the id of a text.
    pub extra: i64,
}

const _: () = assert!(size_of::<Event>() == 64);

impl Event {
    /// The device of host memory.
    pub const HOST: i8 = -1;
    /// The device of a free whose call does not say it.
    pub const UNKNOWN_DEVICE: i8 = -2;

    /// Flag of a call: torch's caching allocator made it. `reserved` names the calling library.
    pub const FROM_TORCH_ALLOCATOR: u8 = 1;
    /// Flag of a call: an allocator made it that reports nothing, so the call is the block.
    pub const UNREPORTED: u8 = 4;
    /// Flag of a block's free: streams still use the block; [`Kind::FreeCompleted`] follows.
    pub const DEFERRED: u8 = 2;

    /// Does it name something for other events? A text has its bytes in the slots behind it, `size` of
    /// them.
    #[must_use]
    pub fn is_definition(&self) -> bool {
        matches!(self.kind(), Some(Kind::DefineText | Kind::DefineContext | Kind::DefineStack))
    }

    /// What happened; `None` for a byte that no version wrote.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        KINDS.get(usize::from(self.kind)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_codes_agree() {
        for (code, kind) in KINDS.iter().enumerate() {
            assert_eq!(*kind as usize, code);
        }
        let torn = Event { kind: 200, ..Event::default() };
        assert_eq!(torn.kind(), None);
    }
}
