//! What the hooks of all calls that take and give back memory share, whichever library has the call.
//!
//! An allocation is recorded after the call, when its outcome is known; a free is announced before it,
//! so that nobody who is given the same address meanwhile stands before it in the trace.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_record::Recorder;
use memtrace_record::clock::now_ns;
use memtrace_trace::event::{self, AllocCall};
use memtrace_trace::{Api, Event, Header, Payload};

use crate::attribution::context;
use crate::attribution::private_pools;
use crate::attribution::requested_sizes;
use crate::ffi::callers::{Library, library_at};
use crate::ffi::cuda::is_captured;
use crate::ffi::torch::current_stream;
use crate::runtime::guard::{Outermost, shielded};
use crate::runtime::session;

/// Where a call writes the address that it gives.
pub(super) type Out = *mut *mut c_void;

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It allocates device memory.
    DeviceAlloc,
    /// It frees device memory.
    DeviceFree,
    /// It allocates pinned host memory.
    HostAlloc,
    /// It frees pinned host memory.
    HostFree,
}

/// A call, as far as it is known before it is made.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) api: Api,
    /// The address behind the call.
    pub(super) caller: *const c_void,
    /// What tells the thread's device.
    pub(super) device: fn() -> i8,
}

/// What a successful call gave.
#[derive(Clone, Copy, Default)]
pub(super) struct Taken {
    /// Its address, or the handle that stands for it.
    pub(super) addr: u64,
    /// Its bytes.
    pub(super) bytes: usize,
    /// The device, when the call names it.
    pub(super) device: Option<i8>,
    /// The physical memory behind it, of a mapping.
    pub(super) handle: u64,
}

impl Taken {
    pub(super) fn new(addr: Option<*mut c_void>, bytes: usize) -> Taken {
        Taken { addr: addr.map_or(0, |addr| addr as u64), bytes, ..Taken::default() }
    }

    /// What an allocation on `stream` gave. One that is captured gives an address and no memory: the graph takes that
    /// when it is launched, and the looks at the device tell what all graphs hold.
    pub(super) fn on(stream: *mut c_void, addr: Option<*mut c_void>, bytes: usize) -> Taken {
        // SAFETY: the stream has just been good for a call of the caller's.
        let is_captured = unsafe { is_captured(stream) };
        Taken::new(addr, if is_captured { 0 } else { bytes })
    }
}

/// A call that takes memory: `run` makes it, `taken` reads what it gave after a success.
pub(super) fn takes(
    call: Call,
    asked: usize,
    run: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> Taken,
) -> c_int {
    let Some(_outermost) = Outermost::enter() else { return run() };
    let recorder = Recorder::active();
    let before = now_ns();
    let status = run();
    // The first call of a process starts CUDA, and then the recorder, whose first row tells of CUDA's devices.
    let after = recorder.is_none().then(now_ns);
    shielded(|| {
        let Some(recorder) = recorder.or_else(session::recorder) else { return };
        let taken = if status == 0 { taken() } else { Taken { bytes: asked, ..Taken::default() } };
        let device = match taken.device {
            Some(device) => device,
            None if call.kind == Kind::HostAlloc => Event::HOST,
            None => (call.device)(),
        };
        let (header, known) = before_outcome(call, Some(device));
        recorder.record(|clock_ns| {
            let alloc = AllocCall {
                call: event::Call {
                    address: taken.addr,
                    bytes: taken.bytes as i64,
                    status: code(status),
                    latency_ns: after.unwrap_or(clock_ns).saturating_sub(before),
                    ..known
                },
                requested: asked as i64,
                handle: taken.handle,
            };
            let payload = if device == Event::HOST || call.kind == Kind::HostAlloc {
                Payload::HostAlloc(alloc)
            } else {
                Payload::DeviceAlloc(alloc)
            };
            payload.pack(Header { clock_ns, device, ..header })
        });
    });
    status
}

/// A call that gives back `bytes` at `addr`, 0 for all that began there.
pub(super) fn gives(call: Call, addr: u64, bytes: usize, run: impl FnOnce() -> c_int) -> c_int {
    // `cudaFree(0)` is how programs initialize the runtime.
    if addr == 0 {
        return run();
    }
    let Some(_outermost) = Outermost::enter() else { return run() };
    // What was never seen to be taken is not worth a trace of its own.
    let announced = Recorder::active().and_then(|recorder| {
        shielded(|| {
            let (header, known) = before_outcome(call, None);
            (recorder, Header { clock_ns: recorder.begin(), ..header }, known)
        })
    });
    let status = run();
    if let Some((recorder, header, known)) = announced {
        shielded(|| {
            let free = event::Call {
                address: addr,
                bytes: bytes as i64,
                status: code(status),
                latency_ns: now_ns().saturating_sub(header.clock_ns),
                ..known
            };
            recorder.commit(if call.kind == Kind::HostFree {
                Payload::HostFree(free).pack(Header { device: Event::HOST, ..header })
            } else {
                Payload::DeviceFree(free).pack(Header { device: Event::UNKNOWN_DEVICE, ..header })
            });
        });
    }
    status
}

/// The part of a call's event that does not depend on its outcome. `device` is where it took memory; what gives
/// memory back repeats the stream of the call that took it.
fn before_outcome(call: Call, device: Option<i8>) -> (Header, event::Call) {
    let Library { name, is_torch_allocator, .. } = library_at(call.caller);
    let is_torchs = is_torch_allocator || requested_sizes::is_inside();
    // With its caching off, torch's allocator may be called before there are streams.
    let has_streams = is_torchs && session::session().is_some_and(|session| session.rounding.caching);
    let at =
        device.filter(|device| has_streams && *device >= 0).map(|device| (device, current_stream(device)));
    let (context, step) = at.map_or_else(context::current, |(_, stream)| context::current_on(stream));
    let known = event::Call {
        address: 0,
        bytes: 0,
        status: 0,
        latency_ns: 0,
        library: name,
        pool: at
            .filter(|_| is_torch_allocator)
            .map_or(0, |(device, stream)| private_pools::current(device, stream)),
        from_torch_allocator: is_torchs,
        unreported: requested_sizes::is_inside_unreported(),
    };
    (Header { clock_ns: 0, api: Some(call.api), device: 0, context, step }, known)
}

/// CUDA's codes are below 1000; one that is not is still an error.
fn code(status: c_int) -> i16 {
    i16::try_from(status).unwrap_or(i16::MAX)
}

/// A node of a CUDA graph that allocates, as far as `CUDA_MEM_ALLOC_NODE_PARAMS` and `cudaMemAllocNodeParams` agree.
#[repr(C)]
pub(super) struct AllocationNode {
    kind: c_int,
    handles: c_int,
    /// 1 is a device.
    location: c_int,
    id: c_int,
    rest: [u64; 11],
    size: usize,
    address: *mut c_void,
}

impl AllocationNode {
    /// What the node will take, when it is launched.
    ///
    /// # Safety
    /// `node` is null or the caller's own, valid by CUDA's contract.
    pub(super) unsafe fn asked(node: *const AllocationNode) -> usize {
        // SAFETY: by the contract.
        unsafe { node.as_ref() }.map_or(0, |node| node.size)
    }

    /// What making it gave: an address and no memory.
    ///
    /// # Safety
    /// The call that made the node succeeded.
    pub(super) unsafe fn taken(node: *const AllocationNode) -> Taken {
        // SAFETY: a call that succeeded has read the node and written its address.
        let Some(node) = (unsafe { node.as_ref() }) else { return Taken::default() };
        Taken { device: i8::try_from(node.id).ok(), ..Taken::new(Some(node.address), 0) }
    }
}

/// What a successful call wrote through `out`.
///
/// # Safety
/// The call that was given `out` succeeded.
pub(super) unsafe fn written<T: Copy>(out: *const T) -> Option<T> {
    // SAFETY: CUDA fails on a null place and writes any other; the check costs nothing.
    (!out.is_null()).then(|| unsafe { *out })
}

/// `cudaIpcMemHandle_t` and `CUipcMemHandle`, which are passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle([u8; 64]);

/// The elements of `levels` levels of a mipmapped array, each half as long every way as the one before.
pub(super) fn mipmapped_elements(extent: [usize; 3], levels: c_uint) -> usize {
    let sides = |level: c_uint| extent.map(|side| side.checked_shr(level).unwrap_or(0).max(1));
    let of = |level| sides(level).into_iter().fold(1usize, usize::saturating_mul);
    (0..levels.clamp(1, usize::BITS)).map(of).fold(0, usize::saturating_add)
}
