//! An event: the fixed-size value that a hook records and the writer thread encodes.
//!
//! A hook packs a [`Payload`] into an [`Event`] and stores it in the queue; it looks nothing up and formats
//! nothing. An event takes one cache line, so the kinds share its fields. [`payload`] is the only place that knows
//! which field holds a value of which kind. [`bytes`] reads events back from the journal of a killed process,
//! where any byte may stand.

pub mod bytes;
mod payload;

pub use payload::{AllocCall, Block, Call, Claim, Payload, UNREPORTED_TOTAL};

use crate::Api;
use crate::context::ContextId;

/// The kind of an event: one for each variant of [`Payload`]. The numbers stand in journals, so they are only ever
/// added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Pad = 0,
    Block = 1,
    OutOfMemory = 2,
    DeviceAlloc = 3,
    DeviceFree = 4,
    HostAlloc = 5,
    HostFree = 6,
    RangeBegin = 7,
    RangeEnd = 8,
    Mark = 9,
    DefineText = 10,
    DefineContext = 11,
    Op = 12,
    Lost = 13,
    FreeCompleted = 14,
    DefineStack = 15,
    Tag = 16,
    Io = 17,
    Sample = 18,
    SamplePools = 19,
    HostSample = 20,
    SampleUnified = 21,
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
    Kind::HostSample,
    Kind::SampleUnified,
];

/// The fields that events of every kind have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// `CLOCK_MONOTONIC`, ns, read inside the hook (so under the allocator's mutex).
    pub clock_ns: u64,
    /// The call; `None` for a byte that no version wrote.
    pub api: Option<Api>,
    /// The CUDA ordinal; [`Event::HOST`] for the host, [`Event::UNKNOWN_DEVICE`] when only the address can tell.
    pub device: i8,
    /// The interned context: op, module, phase.
    pub context: ContextId,
    /// The training step; -1 before the first.
    pub step: i32,
}

impl Header {
    /// An event of `api` on `device`, outside every context and step.
    #[inline(always)]
    #[must_use]
    pub const fn new(clock_ns: u64, api: Api, device: i8) -> Header {
        Header { clock_ns, api: Some(api), device, context: 0, step: 0 }
    }
}

/// A packed event: a cache line. [`Payload::pack`] makes one and [`Event::unpack`] reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Event {
    /// See [`Header::clock_ns`]. A definition of a context has its stream here.
    pub clock_ns: u64,
    kind: u8,
    api: u8,
    device: i8,
    flags: u8,
    status: i16,
    pool: u16,
    addr: u64,
    size: i64,
    allocated: u64,
    reserved: u64,
    context: u32,
    step: i32,
    extra: i64,
}

const _: () = assert!(size_of::<Event>() == 64);

impl Event {
    /// The device of host memory.
    pub const HOST: i8 = -1;
    /// The device of a free whose call does not name it.
    pub const UNKNOWN_DEVICE: i8 = -2;

    fn kind(&self) -> Option<Kind> {
        KINDS.get(usize::from(self.kind)).copied()
    }

    /// Returns true if the event only fills the end of a chunk, or has a kind that no version wrote.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self.kind(), None | Some(Kind::Pad))
    }

    /// Returns true if the event defines a text, a context or a stack.
    #[must_use]
    pub fn is_definition(&self) -> bool {
        matches!(self.kind(), Some(Kind::DefineText | Kind::DefineContext | Kind::DefineStack))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_event_has_its_number() {
        for (code, kind) in KINDS.iter().enumerate() {
            assert_eq!(*kind as usize, code);
        }
        let torn = Event { kind: 200, ..Event::default() };
        assert!(torn.kind().is_none() && torn.is_empty() && torn.unpack().is_none());
    }
}
