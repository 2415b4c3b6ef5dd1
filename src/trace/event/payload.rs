//! The contents of events, by kind, and their packed form.

use super::{Event, Header, Kind};
use crate::context::{Context, ContextId, Frame, StackId, TextId};
use crate::host::HostValues;
use crate::sample::Sample;
use crate::stacks::FrameKind;
use crate::{Api, Category};

/// A report of torch's caching allocator: `c10::reportMemoryUsageToProfiler`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The address of the block.
    pub address: u64,
    /// The size in bytes; negative for a free.
    pub bytes: i64,
    /// The total bytes of blocks on the device after the report.
    pub allocated: usize,
    /// The total bytes of segments on the device after the report.
    pub reserved: usize,
    /// The bytes that the program requested; -1 if unknown.
    pub requested: i64,
    /// The private pool of the allocator; 0 for the default pool.
    pub pool: u16,
    /// True for a free of a block that streams still use; [`Payload::FreeCompleted`] follows.
    pub deferred: bool,
    /// The text id of the type and shape of its tensor ([`crate::form`]); 0 if unknown.
    pub form: u16,
}

/// An op that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpEnd {
    /// The bytes that the thread allocated minus the bytes that it freed during the op.
    pub bytes: i64,
    /// The duration of the op in ns.
    pub duration_ns: u64,
    /// The text id of the op's overload; 0 if unknown.
    pub overload: TextId,
}

/// A call that allocates or frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The address, or the handle of physical memory.
    pub address: u64,
    /// For an allocation, the bytes that the call returned. For a free, the bytes to free, or 0 for the whole
    /// allocation at the address.
    pub bytes: i64,
    /// The return code of the call.
    pub status: i16,
    /// The duration of the call in ns.
    pub latency_ns: u64,
    /// The library that made the call.
    pub library: TextId,
    /// On whose behalf the library works, such as an NCCL communicator; 0 if unknown.
    pub user: TextId,
    /// The private pool of the allocator; 0 for the default pool.
    pub pool: u16,
    /// True if torch's caching allocator made the call.
    pub from_torch_allocator: bool,
    /// True if the caller is an allocator that reports no blocks, so that the call itself is the block.
    pub unreported: bool,
}

/// A call that allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocCall {
    /// The call.
    pub call: Call,
    /// The bytes that the program requested: fewer than `call.bytes` if the rows of an image are padded.
    pub requested: i64,
    /// The handle of the physical memory in a mapping (`cuMemMap`); 0 for other calls.
    pub handle: u64,
}

/// The value of both totals in an OOM that torch's allocator did not report.
pub const UNREPORTED_TOTAL: usize = usize::MAX;

/// The content of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// No event: the slot pads the end of a chunk.
    Pad,
    /// The caching allocator reported a block.
    Block(Block),
    /// The caching allocator reported an OOM: `c10::reportOutOfMemoryToProfiler`.
    OutOfMemory {
        /// The requested bytes, after the allocator's rounding.
        bytes: i64,
        /// The bytes that the program requested; -1 if unknown.
        requested: i64,
        /// The total bytes of blocks on the device, or [`UNREPORTED_TOTAL`].
        allocated: usize,
        /// The total bytes of segments on the device, or [`UNREPORTED_TOTAL`].
        reserved: usize,
        /// The private pool of the allocator; 0 for the default pool.
        pool: u16,
        /// The text id of the type and shape of the tensor; 0 if unknown.
        form: u16,
    },
    /// A call that allocates device memory returned.
    DeviceAlloc(AllocCall),
    /// A call that frees device memory. Its timestamp is taken before the call.
    DeviceFree(Call),
    /// A call that allocates pinned host memory returned.
    HostAlloc(AllocCall),
    /// A call that frees pinned host memory. Its timestamp is taken before the call.
    HostFree(Call),
    /// The last stream that used a deferred block has finished with it.
    FreeCompleted {
        /// The address of the block.
        address: u64,
    },
    /// A range began.
    RangeBegin {
        /// The text id of the name.
        name: TextId,
        /// The text id of a module's class; 0 for other ranges.
        class: TextId,
    },
    /// A range ended.
    RangeEnd {
        /// The text id of the name.
        name: TextId,
    },
    /// A marker.
    Mark {
        /// The text id of the marker.
        name: TextId,
    },
    /// An op ended: an outermost op or, with `MEMTRACE_OPS=all` or `io`, also a nested op.
    Op(OpEnd),
    /// The use of a block became known.
    Tag {
        /// The address of the block.
        address: u64,
        /// The use.
        category: Category,
        /// The module that owns the block; 0 for none.
        module: TextId,
        /// The name of the block in the module.
        name: TextId,
        /// The type and the shape of the tensor, as [`crate::form`] writes them; 0 if unknown.
        form: TextId,
        /// The earlier uses that the tag replaces.
        claim: Claim,
    },
    /// The size of a storage that an op uses, or of the memory of a module or of one of its calls.
    Io {
        /// The address of the storage; 0 for the memory of a module.
        address: u64,
        /// The size of the storage or of the module's memory, in bytes.
        bytes: i64,
        /// For the memory of a module, the bytes after the allocator's rounding; 0 for a storage.
        rounded: i64,
    },
    /// A sample of a device, in bytes.
    Sample {
        /// See [`Sample::total`].
        total: Option<i64>,
        /// See [`Sample::free`].
        free: Option<i64>,
        /// See [`Sample::process`].
        process: Option<i64>,
        /// See [`Sample::others`].
        others: Option<i64>,
        /// See [`Sample::bar1`].
        bar1: Option<i64>,
    },
    /// A sample of a device that shares the host's memory, in bytes.
    SampleUnified {
        /// See [`Sample::total`].
        total: Option<i64>,
        /// See [`Sample::free`].
        free: Option<i64>,
        /// See [`Sample::process`].
        process: Option<i64>,
        /// See [`Sample::cache`].
        cache: Option<i64>,
        /// See [`Sample::host`].
        host: Option<i64>,
    },
    /// A sample of the memory pools of a device, in bytes.
    SamplePools {
        /// See [`Sample::pool_reserved`].
        reserved: Option<i64>,
        /// See [`Sample::pool_used`].
        used: Option<i64>,
        /// See [`Sample::graphs`].
        graphs: Option<i64>,
    },
    /// A sample of host memory. The `api` in the header is the source, which defines the meaning of the
    /// values.
    HostSample {
        /// See [`crate::host::keys`].
        values: HostValues,
        /// The text id of the part's name; 0 for a source without parts.
        what: TextId,
    },
    /// Events of this thread were lost.
    Lost {
        /// The number of lost events.
        events: u64,
    },
    /// The definition of a text. The slots after the event contain its bytes.
    DefineText {
        /// The id of the text.
        id: TextId,
        /// The length in bytes.
        length: usize,
    },
    /// The definition of a context. It has no [`Header`].
    DefineContext {
        /// The id of the context.
        id: ContextId,
        /// The context.
        context: Context,
    },
    /// The definition of a stack.
    DefineStack {
        /// The id of the stack.
        id: StackId,
        /// The innermost frame and the parent stack.
        frame: Frame,
    },
}

/// Flag in [`Event::flags`] of a call: torch's caching allocator is the caller.
const FROM_TORCH_ALLOCATOR: u8 = 1;
/// Flag in [`Event::flags`] of a block: the free is deferred.
const DEFERRED: u8 = 2;
/// Flag in [`Event::flags`] of a call: the calling allocator reports no blocks.
const UNREPORTED: u8 = 4;
/// Flag in [`Event::flags`] of a tag: [`Claim::Weak`].
const WEAK: u8 = 8;
/// Flag in [`Event::flags`] of a tag: [`Claim::Reduced`].
const REDUCED: u8 = 16;

/// The earlier uses of a block that a tag replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Any use.
    Strong,
    /// Only an unknown or a less specific use.
    Weak,
    /// Only an unknown use, an activation, or a gradient without a module, and only if the block was not
    /// allocated in a backward. For blocks whose contents the ranks reduce in a backward.
    Reduced,
}

impl Claim {
    fn flags(self) -> u8 {
        match self {
            Claim::Strong => 0,
            Claim::Weak => WEAK,
            Claim::Reduced => REDUCED,
        }
    }

    fn from_flags(flags: u8) -> Claim {
        match flags & (WEAK | REDUCED) {
            0 => Claim::Strong,
            REDUCED => Claim::Reduced,
            _ => Claim::Weak,
        }
    }
}

impl Payload {
    /// Returns the events of a device sample: one, plus another if pools or graphs are known.
    pub fn of_sample(sample: &Sample) -> impl Iterator<Item = Payload> {
        let Sample { total, free, process, others, bar1, pool_reserved, pool_used, graphs, cache, host } =
            *sample;
        let has_pools = pool_reserved.is_some() || pool_used.is_some() || graphs.is_some();
        let pools = Payload::SamplePools { reserved: pool_reserved, used: pool_used, graphs };
        let device = match cache {
            // For such a device, NVML reports neither BAR1 nor the memory of other processes.
            Some(_) => Payload::SampleUnified { total, free, process, cache, host },
            None => Payload::Sample { total, free, process, others, bar1 },
        };
        [device].into_iter().chain(has_pools.then_some(pools))
    }

    /// Returns a sample with only the values of this event, because another event may have the rest of the
    /// sample. Returns `None` if the event is not a device sample.
    #[must_use]
    pub fn sample(&self) -> Option<Sample> {
        match *self {
            Payload::Sample { total, free, process, others, bar1 } => {
                Some(Sample { total, free, process, others, bar1, ..Sample::default() })
            }
            Payload::SampleUnified { total, free, process, cache, host } => {
                Some(Sample { total, free, process, cache, host, ..Sample::default() })
            }
            Payload::SamplePools { reserved, used, graphs } => {
                Some(Sample { pool_reserved: reserved, pool_used: used, graphs, ..Sample::default() })
            }
            _ => None,
        }
    }

    /// Packs a definition, which has no header.
    #[must_use]
    pub fn define(self) -> Event {
        self.pack(Header::new(0, Api::Memtrace, 0))
    }

    /// Returns the kind of the packed event.
    #[inline(always)]
    fn kind(&self) -> Kind {
        match self {
            Payload::Pad => Kind::Pad,
            Payload::Block(_) => Kind::Block,
            Payload::OutOfMemory { .. } => Kind::OutOfMemory,
            Payload::DeviceAlloc(_) => Kind::DeviceAlloc,
            Payload::DeviceFree(_) => Kind::DeviceFree,
            Payload::HostAlloc(_) => Kind::HostAlloc,
            Payload::HostFree(_) => Kind::HostFree,
            Payload::FreeCompleted { .. } => Kind::FreeCompleted,
            Payload::RangeBegin { .. } => Kind::RangeBegin,
            Payload::RangeEnd { .. } => Kind::RangeEnd,
            Payload::Mark { .. } => Kind::Mark,
            Payload::Op(_) => Kind::Op,
            Payload::Tag { .. } => Kind::Tag,
            Payload::Io { .. } => Kind::Io,
            Payload::Sample { .. } => Kind::Sample,
            Payload::SampleUnified { .. } => Kind::SampleUnified,
            Payload::SamplePools { .. } => Kind::SamplePools,
            Payload::HostSample { .. } => Kind::HostSample,
            Payload::Lost { .. } => Kind::Lost,
            Payload::DefineText { .. } => Kind::DefineText,
            Payload::DefineContext { .. } => Kind::DefineContext,
            Payload::DefineStack { .. } => Kind::DefineStack,
        }
    }

    /// Packs an event. Hooks call this with a constant variant, so it compiles to stores of the variant's
    /// fields.
    #[inline(always)]
    #[must_use]
    pub fn pack(self, header: Header) -> Event {
        let Header { clock_ns, api, device, context, step } = header;
        let api = match api {
            Some(api) => api as u8,
            None => u8::MAX,
        };
        let event =
            Event { clock_ns, kind: self.kind() as u8, api, device, context, step, ..Event::default() };
        match self {
            Payload::Pad => event,
            Payload::Block(Block {
                address,
                bytes,
                allocated,
                reserved,
                requested,
                pool,
                deferred,
                form,
            }) => Event {
                addr: address,
                size: bytes,
                allocated: allocated as u64,
                reserved: reserved as u64,
                extra: requested,
                pool,
                flags: u8::from(deferred) * DEFERRED,
                status: form.cast_signed(),
                ..event
            },
            Payload::OutOfMemory { bytes, requested, allocated, reserved, pool, form } => Event {
                status: form.cast_signed(),
                size: bytes,
                extra: requested,
                allocated: allocated as u64,
                reserved: reserved as u64,
                pool,
                ..event
            },
            Payload::DeviceAlloc(alloc) | Payload::HostAlloc(alloc) => {
                let asked = if is_mapping(header.api) { alloc.handle } else { alloc.requested as u64 };
                Event { allocated: asked, ..call(alloc.call, event) }
            }
            Payload::DeviceFree(free) | Payload::HostFree(free) => call(free, event),
            Payload::FreeCompleted { address } => Event { addr: address, ..event },
            Payload::RangeBegin { name, class } => {
                Event { extra: i64::from(name), reserved: u64::from(class), ..event }
            }
            Payload::RangeEnd { name } | Payload::Mark { name } => Event { extra: i64::from(name), ..event },
            Payload::Op(OpEnd { bytes, duration_ns, overload }) => {
                Event { size: bytes, extra: duration_ns as i64, reserved: u64::from(overload), ..event }
            }
            Payload::Tag { address, category, module, name, form, claim } => Event {
                addr: address,
                allocated: u64::from(form),
                flags: claim.flags(),
                size: i64::from(category.id()),
                extra: i64::from(module),
                reserved: u64::from(name),
                ..event
            },
            Payload::Io { address, bytes, rounded } => {
                Event { addr: address, size: bytes, reserved: rounded as u64, ..event }
            }
            Payload::Sample { total, free, process, others, bar1 } => Event {
                addr: optional(total) as u64,
                size: optional(free),
                allocated: optional(process) as u64,
                reserved: optional(others) as u64,
                extra: optional(bar1),
                ..event
            },
            Payload::SampleUnified { total, free, process, cache, host } => Event {
                addr: optional(total) as u64,
                size: optional(free),
                allocated: optional(process) as u64,
                reserved: optional(cache) as u64,
                extra: optional(host),
                ..event
            },
            Payload::SamplePools { reserved, used, graphs } => Event {
                size: optional(reserved),
                allocated: optional(used) as u64,
                reserved: optional(graphs) as u64,
                ..event
            },
            Payload::HostSample { values, what } => {
                let [first, second, third, fourth, fifth] = values.map(optional);
                Event {
                    addr: first as u64,
                    size: second,
                    allocated: third as u64,
                    reserved: fourth as u64,
                    extra: fifth,
                    // The id needs four bytes, but only two fields of two bytes are left.
                    pool: what as u16,
                    status: (what >> 16) as i16,
                    ..event
                }
            }
            Payload::Lost { events } => Event { size: events as i64, ..event },
            Payload::DefineText { id, length } => Event { addr: u64::from(id), size: length as i64, ..event },
            Payload::DefineContext { id, context } => Event {
                addr: u64::from(id),
                size: i64::from(context.op),
                allocated: u64::from(context.module),
                reserved: u64::from(context.phase),
                extra: i64::from(context.stack),
                flags: context.flags,
                pool: context.category.id().into(),
                // Every other field is in use, and a definition has no time.
                clock_ns: context.stream as u64,
                ..event
            },
            Payload::DefineStack { id, frame } => Event {
                addr: u64::from(id),
                size: i64::from(frame.parent),
                extra: i64::from(frame.text),
                flags: frame.kind.id(),
                ..event
            },
        }
    }
}

/// Fills in the fields of a call.
#[inline(always)]
fn call(call: Call, event: Event) -> Event {
    let Call { address, bytes, status, latency_ns, library, user, pool, from_torch_allocator, unreported } =
        call;
    Event {
        addr: address,
        size: bytes,
        status,
        extra: latency_ns as i64,
        reserved: u64::from(library) | u64::from(user) << 32,
        pool,
        flags: (u8::from(from_torch_allocator) * FROM_TORCH_ALLOCATOR) | (u8::from(unreported) * UNREPORTED),
        ..event
    }
}

/// Returns true for a call that maps memory. Such a call has no requested size, so the field of that size
/// holds the handle of the physical memory.
fn is_mapping(api: Option<Api>) -> bool {
    api == Some(Api::CuMemMap)
}

/// Packs a number of bytes that may be unknown.
fn optional(bytes: Option<i64>) -> i64 {
    bytes.unwrap_or(-1)
}

/// Unpacks a number of bytes, the inverse of [`optional`].
fn known(bytes: i64) -> Option<i64> {
    (bytes >= 0).then_some(bytes)
}

impl Event {
    /// Unpacks a block report. Returns `None` for other events.
    #[inline(always)]
    #[must_use]
    pub fn unpack_block(&self) -> Option<(Header, Block)> {
        (self.kind == Kind::Block as u8).then(|| (self.header(), self.block()))
    }

    /// Unpacks the end of an op. Returns `None` for other events. Ops are as frequent as reports, and this function
    /// spares the writer thread a [`Payload`].
    #[inline(always)]
    #[must_use]
    pub fn unpack_op(&self) -> Option<(Header, OpEnd)> {
        (self.kind == Kind::Op as u8).then(|| (self.header(), self.op()))
    }

    /// Unpacks the event. Returns `None` for an unknown kind. All other fields accept any value, because an
    /// event of a killed process may contain any bytes.
    #[inline(always)]
    #[must_use]
    pub fn unpack(&self) -> Option<(Header, Payload)> {
        let header = self.header();
        let payload = match self.kind()? {
            Kind::Pad => Payload::Pad,
            Kind::Block => Payload::Block(self.block()),
            Kind::OutOfMemory => Payload::OutOfMemory {
                bytes: self.size,
                requested: self.extra,
                allocated: self.allocated as usize,
                reserved: self.reserved as usize,
                pool: self.pool,
                form: self.status.cast_unsigned(),
            },
            Kind::DeviceAlloc => Payload::DeviceAlloc(self.alloc_call(header.api)),
            Kind::HostAlloc => Payload::HostAlloc(self.alloc_call(header.api)),
            Kind::DeviceFree => Payload::DeviceFree(self.call()),
            Kind::HostFree => Payload::HostFree(self.call()),
            Kind::FreeCompleted => Payload::FreeCompleted { address: self.addr },
            Kind::RangeBegin => {
                Payload::RangeBegin { name: self.extra as TextId, class: self.reserved as TextId }
            }
            Kind::RangeEnd => Payload::RangeEnd { name: self.extra as TextId },
            Kind::Mark => Payload::Mark { name: self.extra as TextId },
            Kind::Op => Payload::Op(self.op()),
            Kind::Tag => Payload::Tag {
                address: self.addr,
                category: u64::try_from(self.size).ok().and_then(Category::from_id).unwrap_or_default(),
                module: TextId::try_from(self.extra).unwrap_or(0),
                name: self.reserved as TextId,
                form: self.allocated as TextId,
                claim: Claim::from_flags(self.flags),
            },
            Kind::Io => Payload::Io { address: self.addr, bytes: self.size, rounded: self.reserved as i64 },
            Kind::Sample => Payload::Sample {
                total: known(self.addr as i64),
                free: known(self.size),
                process: known(self.allocated as i64),
                others: known(self.reserved as i64),
                bar1: known(self.extra),
            },
            Kind::SampleUnified => Payload::SampleUnified {
                total: known(self.addr as i64),
                free: known(self.size),
                process: known(self.allocated as i64),
                cache: known(self.reserved as i64),
                host: known(self.extra),
            },
            Kind::SamplePools => Payload::SamplePools {
                reserved: known(self.size),
                used: known(self.allocated as i64),
                graphs: known(self.reserved as i64),
            },
            Kind::HostSample => Payload::HostSample {
                values: [
                    self.addr as i64,
                    self.size,
                    self.allocated as i64,
                    self.reserved as i64,
                    self.extra,
                ]
                .map(known),
                what: TextId::from(self.status as u16) << 16 | TextId::from(self.pool),
            },
            Kind::Lost => Payload::Lost { events: u64::try_from(self.size).unwrap_or(0) },
            Kind::DefineText => Payload::DefineText {
                id: self.addr as TextId,
                length: usize::try_from(self.size).unwrap_or(0),
            },
            Kind::DefineContext => Payload::DefineContext {
                id: self.addr as ContextId,
                context: Context {
                    op: self.size as TextId,
                    module: self.allocated as TextId,
                    phase: self.reserved as TextId,
                    stack: self.extra as StackId,
                    stream: self.clock_ns as i64,
                    flags: self.flags,
                    category: Category::from_id(self.pool.into()).unwrap_or_default(),
                },
            },
            Kind::DefineStack => Payload::DefineStack {
                id: self.addr as StackId,
                frame: Frame {
                    parent: self.size as StackId,
                    text: self.extra as TextId,
                    kind: FrameKind::from_id(self.flags.into()).unwrap_or_default(),
                },
            },
        };
        Some((header, payload))
    }

    #[inline(always)]
    fn header(&self) -> Header {
        Header {
            clock_ns: self.clock_ns,
            api: Api::from_id(self.api.into()),
            device: self.device,
            context: self.context,
            step: self.step,
        }
    }

    #[inline(always)]
    fn block(&self) -> Block {
        Block {
            address: self.addr,
            bytes: self.size,
            allocated: self.allocated as usize,
            reserved: self.reserved as usize,
            requested: self.extra,
            pool: self.pool,
            deferred: self.flags & DEFERRED != 0,
            form: self.status.cast_unsigned(),
        }
    }

    #[inline(always)]
    fn op(&self) -> OpEnd {
        let (duration_ns, overload) = (self.extra as u64, self.reserved as TextId);
        OpEnd { bytes: self.size, duration_ns, overload }
    }

    #[inline(always)]
    fn alloc_call(&self, api: Option<Api>) -> AllocCall {
        let call = self.call();
        if is_mapping(api) {
            return AllocCall { call, requested: call.bytes, handle: self.allocated };
        }
        // A requested size of 0 in the event means that it equals the returned size.
        let requested = if self.allocated == 0 { call.bytes } else { self.allocated as i64 };
        AllocCall { call, requested, handle: 0 }
    }

    #[inline(always)]
    fn call(&self) -> Call {
        Call {
            address: self.addr,
            bytes: self.size,
            status: self.status,
            latency_ns: self.extra as u64,
            library: self.reserved as TextId,
            user: (self.reserved >> 32) as TextId,
            pool: self.pool,
            from_torch_allocator: self.flags & FROM_TORCH_ALLOCATOR != 0,
            unreported: self.flags & UNREPORTED != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one event of each kind. Every field differs from its default.
    fn payloads() -> Vec<Payload> {
        let call = Call {
            address: 0x7f00_0000_0200,
            bytes: 1 << 40,
            status: -7,
            latency_ns: 1 << 41,
            library: 5,
            user: 7,
            pool: 6,
            from_torch_allocator: true,
            unreported: true,
        };
        let alloc = AllocCall { call, requested: 1000, handle: 0 };
        let category = Category::ReduceScatter;
        let context = Context { op: 1, module: 2, phase: 3, stack: 4, stream: -5, flags: 6, category };
        vec![
            Payload::Pad,
            Payload::Block(Block {
                address: 1 << 47,
                bytes: -(1 << 40),
                allocated: 1 << 41,
                reserved: 1 << 42,
                requested: -1,
                pool: 3,
                deferred: true,
                form: 40_000,
            }),
            Payload::OutOfMemory { bytes: 7, requested: 5, allocated: 3, reserved: 9, pool: 1, form: 2 },
            Payload::DeviceAlloc(alloc),
            Payload::DeviceFree(call),
            Payload::HostAlloc(AllocCall { call: Call { unreported: false, ..call }, ..alloc }),
            Payload::HostFree(Call { from_torch_allocator: false, ..call }),
            Payload::RangeBegin { name: u32::MAX, class: 6 },
            Payload::RangeEnd { name: 2 },
            Payload::Mark { name: 3 },
            Payload::DefineText { id: 4, length: 70 },
            Payload::DefineContext { id: 5, context },
            Payload::Op(OpEnd { bytes: -6, duration_ns: 7, overload: 8 }),
            Payload::Lost { events: 9 },
            Payload::FreeCompleted { address: 10 },
            Payload::DefineStack { id: 11, frame: Frame { parent: 12, text: 13, kind: FrameKind::Python } },
            Payload::Tag {
                address: 14,
                category: Category::Gradient,
                module: 15,
                name: 16,
                form: 30,
                claim: Claim::Reduced,
            },
            Payload::Io { address: 17, bytes: 18, rounded: 19 },
            Payload::Sample {
                total: Some(20),
                free: None,
                process: Some(0),
                others: Some(21),
                bar1: Some(22),
            },
            Payload::SamplePools { reserved: Some(23), used: None, graphs: Some(24) },
            Payload::HostSample {
                values: [Some(25), Some(0), None, Some(1 << 50), Some(26)],
                what: 0xfedc_ba98,
            },
            Payload::SampleUnified {
                total: Some(27),
                free: Some(0),
                process: None,
                cache: Some(28),
                host: Some(29),
            },
        ]
    }

    const HEADER: Header =
        Header { clock_ns: 1 << 50, api: Some(Api::CudaMalloc), device: -2, context: u32::MAX, step: -1 };

    #[test]
    fn every_payload_comes_back_from_its_event() {
        let mut codes: Vec<u8> = Vec::new();
        for payload in payloads() {
            let event = payload.pack(HEADER);
            codes.push(event.kind);
            let (header, unpacked) = event.unpack().unwrap();
            assert_eq!(unpacked, payload);
            if !matches!(payload, Payload::DefineContext { .. }) {
                assert_eq!(header, HEADER);
            }
        }
        assert!(codes.iter().map(|code| usize::from(*code)).eq(0..super::super::KINDS.len()));
    }

    #[test]
    fn a_mapping_keeps_the_handle_of_its_physical_memory() {
        let Payload::DeviceAlloc(alloc) = payloads()[3] else { unreachable!() };
        let header = Header { api: Some(Api::CuMemMap), ..HEADER };
        let mapping = AllocCall { handle: 77, requested: alloc.call.bytes, ..alloc };
        let event = Payload::DeviceAlloc(mapping).pack(header);
        assert_eq!(event.unpack(), Some((header, Payload::DeviceAlloc(mapping))));
        // A requested size of 0 means that it equals the returned size -> unpacked as the returned size.
        let event = Payload::DeviceAlloc(AllocCall { requested: 0, ..alloc }).pack(HEADER);
        let Some((_, Payload::DeviceAlloc(unpacked))) = event.unpack() else { unreachable!() };
        assert_eq!(unpacked.requested, alloc.call.bytes);
    }

    #[test]
    fn a_device_sample_comes_back_from_its_events() {
        let sample = Sample { total: Some(9), others: Some(0), pool_used: Some(7), ..Sample::default() };
        let unpacked: Vec<Sample> = Payload::of_sample(&sample)
            .filter_map(|payload| payload.pack(HEADER).unpack()?.1.sample())
            .collect();
        assert_eq!(unpacked.len(), 2);
        assert_eq!(unpacked.into_iter().fold(Sample::default(), Sample::updated), sample);
        let unified =
            Sample { total: Some(9), free: Some(1), cache: Some(3), host: Some(0), ..Sample::default() };
        let [only] = Payload::of_sample(&unified).collect::<Vec<_>>()[..] else { panic!() };
        assert_eq!(only.pack(HEADER).unpack().unwrap().1.sample(), Some(unified));
    }

    #[test]
    fn an_event_of_any_bytes_unpacks() {
        for kind in 0..=u8::MAX {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = [byte; 64];
                bytes[8] = kind;
                let event = super::super::bytes::event_of(&bytes);
                assert_eq!(event.unpack().is_some(), usize::from(kind) < super::super::KINDS.len());
            }
        }
    }
}
