//! An event: the fixed-size value that a hook records and the writer thread encodes.
//!
//! A hook packs a [`Payload`] into an [`Event`] and stores it in the queue, without any lookup or formatting.
//! An event fits in one cache line, so the kinds of events share its fields. Only [`payload`] knows, for
//! each kind of event, which field contains which value. [`bytes`] reads events back from the journal of a killed
//! process, where any byte may be invalid.

pub mod bytes;
mod payload;
pub mod tied;

pub use payload::{AllocCall, Block, Call, Claim, OpEnd, Payload, UNREPORTED_TOTAL};

use crate::Api;
use crate::context::ContextId;

/// The kind of an event, one for each variant of [`Payload`]. Journals contain these numbers, so they never
/// change, and new ones are appended.
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

/// The kinds that define a text, a context or a stack.
const DEFINITIONS: [u8; 3] = [Kind::DefineText as u8, Kind::DefineContext as u8, Kind::DefineStack as u8];

/// The fields that all events have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The time of `CLOCK_MONOTONIC` in ns, read inside the hook (so under the allocator's mutex).
    pub clock_ns: u64,
    /// The call; `None` if the code is unknown, as a damaged journal may contain.
    pub api: Option<Api>,
    /// The CUDA ordinal, [`Event::HOST`] for the host, or [`Event::UNKNOWN_DEVICE`] if only the address
    /// identifies the device.
    pub device: i8,
    /// The interned context (op, module, phase).
    pub context: ContextId,
    /// The training step; -1 before the first.
    pub step: i32,
}

impl Header {
    /// Creates the header of an event of `api` on `device`, with no context and with step 0. If the row of
    /// the event shows this step, a caller outside all steps must set it to -1.
    #[inline(always)]
    #[must_use]
    pub const fn new(clock_ns: u64, api: Api, device: i8) -> Header {
        Header { clock_ns, api: Some(api), device, context: 0, step: 0 }
    }
}

/// A packed event, one cache line. [`Payload::pack`] creates it and [`Event::unpack`] reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Event {
    /// See [`Header::clock_ns`]. The definition of a context stores its stream here.
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
    /// The device number of pinned host memory, and of rows about the process or the machine.
    pub const HOST: i8 = -1;
    /// The device number of CPU tensors.
    pub const CPU: i8 = -2;
    /// The device number of a free whose call does not name the device.
    pub const UNKNOWN_DEVICE: i8 = i8::MIN;

    fn kind(&self) -> Option<Kind> {
        KINDS.get(usize::from(self.kind)).copied()
    }

    /// Returns true if the event only pads the end of a chunk, or is of an unknown kind, as a damaged journal
    /// may contain.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kind == Kind::Pad as u8 || usize::from(self.kind) >= KINDS.len()
    }

    /// Returns true if the event defines a text, a context or a stack.
    #[inline(always)]
    #[must_use]
    pub fn is_definition(&self) -> bool {
        DEFINITIONS.contains(&self.kind)
    }

    /// Returns true if the event is neither empty nor a definition.
    #[inline(always)]
    #[must_use]
    pub fn has_content(&self) -> bool {
        /// The bit of each such kind.
        const KINDS_WITH_CONTENT: u32 = {
            let mut bits = (1 << KINDS.len()) - 1 - (1 << Kind::Pad as u32);
            let mut index = 0;
            while index < DEFINITIONS.len() {
                bits -= 1 << DEFINITIONS[index];
                index += 1;
            }
            bits
        };
        KINDS_WITH_CONTENT.checked_shr(self.kind.into()).is_some_and(|bits| bits & 1 == 1)
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
        for kind in 0..=u8::MAX {
            let event = Event { kind, ..Event::default() };
            assert_eq!(event.has_content(), !event.is_empty() && !event.is_definition(), "{kind}");
        }
        let torn = Event { kind: 200, ..Event::default() };
        assert!(torn.kind().is_none() && torn.is_empty() && torn.unpack().is_none());
    }
}
