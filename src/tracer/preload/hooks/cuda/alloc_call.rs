//! The shared code of every hook of the runtime or the driver that allocates or frees memory.
//!
//! An allocation is recorded after the call, when its outcome is known. The record of a free begins before
//! the call: another thread may get the same address at once, and its allocation must come later in the
//! trace.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_record::clock::now_ns;
use memtrace_record::device_calls::DeviceCall;
use memtrace_record::{Recorder, pinned_requests};
use memtrace_trace::event::{self, AllocCall};
use memtrace_trace::{Api, Event, Header, Payload};

use crate::attribution::{
    communicators, context, first_uses, pinned_sizes, private_pools, requested_sizes, tensor_forms,
};
use crate::ffi::callers::{Library, library_at};
use crate::ffi::cuda::{current_device, current_driver_device, is_captured};
use crate::ffi::cuda_types::{AllocNodeParams, SUCCESS};
use crate::ffi::phantom;
use crate::ffi::torch::current_stream;
use crate::guard::{Outermost, shielded};
use crate::hooks::torch::allocator::record_out_of_memory;
use crate::runtime::{session, thread};

/// The out-parameter through which a call returns an address or a handle.
pub(super) type Out = *mut *mut c_void;

/// The kind of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CallKind {
    /// Allocates device memory.
    DeviceAlloc,
    /// Frees device memory.
    DeviceFree,
    /// Allocates pinned host memory.
    HostAlloc,
    /// Frees pinned host memory.
    HostFree,
}

/// The properties of a call that are known before it is made.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) kind: CallKind,
    pub(super) api: Api,
    /// The return address of the call.
    pub(super) caller: *const c_void,
    /// True for a call of the driver, false for one of the runtime.
    is_driver: bool,
}

impl Call {
    /// Describes a call of the runtime.
    pub(super) fn runtime(kind: CallKind, api: Api, caller: *const c_void) -> Call {
        Call { kind, api, caller, is_driver: false }
    }

    /// Describes a call of the driver.
    pub(super) fn driver(kind: CallKind, api: Api, caller: *const c_void) -> Call {
        Call { kind, api, caller, is_driver: true }
    }

    /// Returns false if the settings turn off the record of calls of the driver, and this is one.
    fn is_recorded(self) -> bool {
        !self.is_driver || session::session().is_some_and(|session| session.settings.driver)
    }

    /// Returns the runtime's current device, or the device of the driver's current context.
    fn device(self) -> i8 {
        if self.is_driver { current_driver_device() } else { current_device() }
    }
}

/// Defines the bodies of hooks that allocate memory, of the `runtime` or of the `driver`.
///
/// A line gives the body, the static of the real function, the kind and the API of the call, its arguments, the
/// number of bytes that it requests, and the result of a call that succeeded. The last two may read the caller's
/// pointers.
macro_rules! alloc_hooks {
    ($library:ident $($body:ident = $real:ident, $kind:ident, $api:ident $arguments:tt requests $requested:expr => |$bytes:ident| $allocated:expr;)*) => { $(
        $crate::hooks::cuda::alloc_call::hook_body! { $library $body, $real $arguments |run, caller| {
            let $bytes: usize = $requested;
            let call = $crate::hooks::cuda::alloc_call::call_of! { $library $kind $api caller };
            $crate::hooks::cuda::alloc_call::record_alloc(call, $bytes, run, || $allocated)
        } }
    )* };
}

/// Defines the bodies of hooks that free memory. A line is the same as in [`alloc_hooks`], but ends with the
/// address and the number of bytes that are freed; 0 means the whole allocation.
macro_rules! free_hooks {
    ($library:ident $($body:ident = $real:ident, $kind:ident, $api:ident $arguments:tt frees $address:ident, $bytes:expr;)*) => { $(
        $crate::hooks::cuda::alloc_call::hook_body! { $library $body, $real $arguments |run, caller| {
            let call = $crate::hooks::cuda::alloc_call::call_of! { $library $kind $api caller };
            $crate::hooks::cuda::alloc_call::record_free(call, $address as u64, $bytes, run)
        } }
    )* };
}

/// Describes the call of a hook.
macro_rules! call_of {
    ($library:ident $kind:ident $api:ident $caller:ident) => {
        $crate::hooks::cuda::alloc_call::Call::$library(
            $crate::hooks::cuda::alloc_call::CallKind::$kind,
            ::memtrace_trace::Api::$api,
            $caller,
        )
    };
}

/// Defines the body of a hook, which records the call that `$run` makes. A hook of the driver has a body for each
/// way in which a program gets the function.
macro_rules! hook_body {
    (runtime $body:ident, $real:ident ($($arg:ident: $type:ty),*) |$run:ident, $caller:ident| $record:expr) => {
        unsafe extern "C" fn $body($($arg: $type,)* $caller: *const ::std::ffi::c_void) -> ::std::ffi::c_int {
            let Some(real) = $real.get() else { return $crate::ffi::cuda_types::NOT_INITIALIZED };
            // SAFETY: the arguments are passed on unchanged, and are valid by CUDA's contract. The result of the
            // call is read only after the call succeeded.
            unsafe {
                let $run = || real($($arg),*);
                $record
            }
        }
    };
    (driver $body:ident, $real:ident ($($arg:ident: $type:ty),*) |$run:ident, $caller:ident| $record:expr) => {
        unsafe extern "C" fn $body<const WAY: usize>(
            $($arg: $type,)* $caller: *const ::std::ffi::c_void
        ) -> ::std::ffi::c_int {
            let Some(real) = $real.get(WAY) else { return $crate::ffi::cuda_types::NOT_INITIALIZED };
            // SAFETY: as for the runtime.
            unsafe {
                let $run = || real($($arg),*);
                $record
            }
        }
    };
}

pub(super) use {alloc_hooks, call_of, free_hooks, hook_body};

/// The result of a successful allocation.
#[derive(Clone, Copy, Default)]
pub(super) struct Allocated {
    /// The address, or the handle if there is no address.
    pub(super) address: u64,
    /// The size in bytes.
    pub(super) bytes: usize,
    /// The device, if the call names one.
    pub(super) device: Option<i8>,
    /// The handle of the mapped physical memory if the call maps memory, otherwise 0.
    pub(super) handle: u64,
}

impl Allocated {
    /// Returns an allocation of `bytes` bytes at `address`, on the thread's device.
    pub(super) fn new(address: Option<*mut c_void>, bytes: usize) -> Allocated {
        Allocated { address: address.map_or(0, |address| address as u64), bytes, ..Allocated::default() }
    }

    /// Returns an allocation of `bytes` bytes at the address that a call wrote to `out`, on the thread's device.
    ///
    /// # Safety
    /// The call that was given `out` succeeded.
    pub(super) unsafe fn at(out: Out, bytes: usize) -> Allocated {
        // SAFETY: by the contract.
        Allocated::new(unsafe { written(out) }, bytes)
    }

    /// Same as [`at`](Allocated::at), for an allocation on `stream`. If a graph captures the call, the call
    /// returns an address but counts as 0 bytes, because the graph allocates the memory at its launch. Device
    /// samples include the memory of graphs.
    ///
    /// # Safety
    /// The call that was given `out` succeeded. `stream` is null or a live stream.
    pub(super) unsafe fn on(stream: *mut c_void, out: Out, bytes: usize) -> Allocated {
        // SAFETY: by the contract.
        unsafe { Allocated::at(out, if is_captured(stream) { 0 } else { bytes }) }
    }

    /// Same as [`at`](Allocated::at), for an allocation of `height` rows. The call wrote the distance between two
    /// rows to `pitch`.
    ///
    /// # Safety
    /// The call that was given `out` and `pitch` succeeded.
    pub(super) unsafe fn rows(out: Out, pitch: *const usize, width: usize, height: usize) -> Allocated {
        // SAFETY: by the contract.
        unsafe { Allocated::at(out, written(pitch).unwrap_or(width).saturating_mul(height)) }
    }
}

/// Makes an allocating call and records it. `run` makes the call, and `allocated` reads its result;
/// `allocated` runs only if the call succeeded. `requested` is the size in bytes that is recorded if the call
/// fails.
pub(super) fn record_alloc(
    call: Call,
    requested: usize,
    run: impl FnOnce() -> c_int,
    allocated: impl FnOnce() -> Allocated,
) -> c_int {
    if !call.is_recorded() {
        return run();
    }
    let Some(_outermost) = Outermost::enter() else { return run() };
    let _device_call = (call.kind == CallKind::DeviceAlloc).then(DeviceCall::begin);
    let recorder = Recorder::active();
    let before = now_ns();
    let status = run();
    // No recorder exists before the first call, because the recorder's first row describes CUDA's devices,
    // and this call starts CUDA. So the end time is read here, before the recorder starts, and the latency
    // does not include the start of the recorder.
    let after = recorder.is_none().then(now_ns);
    shielded(|| {
        let Some(recorder) = recorder.or_else(session::recorder) else { return };
        let allocated = if status == SUCCESS {
            allocated()
        } else {
            Allocated { bytes: requested, ..Allocated::default() }
        };
        let device = match allocated.device {
            Some(device) => device,
            None if call.kind == CallKind::HostAlloc => Event::HOST,
            None => call.device(),
        };
        if device != Event::HOST && call.kind == CallKind::DeviceAlloc && status == SUCCESS {
            first_uses::note(device);
        }
        let (header, known) = before_outcome(call, Some(device));
        if status == SUCCESS && known.from_torch_allocator {
            // With caching disabled (`PYTORCH_NO_CUDA_MEMORY_CACHING`), the memory of this call is the block
            // that torch returns.
            thread::with(|state| state.last_block.set(allocated.address as usize));
        }
        if status == SUCCESS && phantom::take_grant() {
            record_past_oom(recorder, Header { device, ..header }, allocated.bytes, known.pool);
        }
        recorder.record(|clock_ns| {
            let alloc = AllocCall {
                call: event::Call {
                    address: allocated.address,
                    bytes: allocated.bytes as i64,
                    status: code(status),
                    latency_ns: after.unwrap_or(clock_ns).saturating_sub(before),
                    ..known
                },
                requested: match call.kind {
                    CallKind::HostAlloc => pinned_sizes::of_call(requested as i64),
                    _ => requested as i64,
                },
                handle: allocated.handle,
            };
            let payload = if device == Event::HOST || call.kind == CallKind::HostAlloc {
                Payload::HostAlloc(alloc)
            } else {
                Payload::DeviceAlloc(alloc)
            };
            payload.pack(Header { clock_ns, device, ..header })
        });
    });
    status
}

/// Records an OOM for a request that the simulated card granted but a real card would have refused. `bytes`
/// is the size of the request.
fn record_past_oom(recorder: &'static Recorder, header: Header, bytes: usize, pool: u16) {
    let requested = requested_sizes::in_progress();
    let rounded = session::session()
        .and_then(|session| Some(session.rounding.round(u64::try_from(requested).ok()?) as i64))
        .unwrap_or(bytes as i64);
    let (allocated, reserved) = (event::UNREPORTED_TOTAL, event::UNREPORTED_TOTAL);
    let form = thread::with(tensor_forms::of_block).unwrap_or(0);
    let oom = Payload::OutOfMemory { bytes: rounded, requested, allocated, reserved, pool, form };
    record_out_of_memory(recorder, oom, Header { api: Some(Api::PastOom), ..header });
}

/// Makes a freeing call and records it. The call frees `bytes` bytes at `address`; 0 means the whole
/// allocation.
pub(super) fn record_free(call: Call, address: u64, bytes: usize, run: impl FnOnce() -> c_int) -> c_int {
    // Programs initialize the runtime with `cudaFree(0)`, which frees nothing.
    if address == 0 || !call.is_recorded() {
        return run();
    }
    let Some(_outermost) = Outermost::enter() else { return run() };
    let _device_call = (call.kind == CallKind::DeviceFree).then(DeviceCall::begin);
    // A free does not start a trace, because without a trace, no allocation that it could free was recorded.
    let begun = Recorder::active().and_then(|recorder| {
        shielded(|| {
            let (header, known) = before_outcome(call, None);
            (recorder, Header { clock_ns: recorder.begin(), ..header }, known)
        })
    });
    let status = run();
    if let Some((recorder, header, known)) = begun {
        shielded(|| {
            if call.kind == CallKind::HostFree && status == SUCCESS {
                pinned_requests::released(address);
            }
            let free = event::Call {
                address,
                bytes: bytes as i64,
                status: code(status),
                latency_ns: now_ns().saturating_sub(header.clock_ns),
                ..known
            };
            recorder.commit(if call.kind == CallKind::HostFree {
                Payload::HostFree(free).pack(Header { device: Event::HOST, ..header })
            } else {
                Payload::DeviceFree(free).pack(Header { device: Event::UNKNOWN_DEVICE, ..header })
            });
        });
    }
    status
}

/// Returns the part of a call's event that does not depend on the result. `device` is the device of an
/// allocation. It is `None` for a free, whose stream is not looked up, because the row of a free repeats the
/// stream of its allocation.
fn before_outcome(call: Call, device: Option<i8>) -> (Header, event::Call) {
    let Library { name, is_torch_allocator, is_nccl, .. } = library_at(call.caller);
    let is_torchs = is_torch_allocator || requested_sizes::is_inside();
    // With caching disabled, torch's allocator may run before torch has set up its streams, so
    // [`current_stream`] must not be called.
    let has_streams = is_torchs && session::session().is_some_and(|session| session.rounding.caching);
    let at =
        device.filter(|device| has_streams && *device >= 0).map(|device| (device, current_stream(device)));
    let (context, step) = match at {
        Some((_, stream)) => context::current_on(stream),
        None if device == Some(Event::HOST) => context::of_pinned(),
        None => context::current(),
    };
    let known = event::Call {
        address: 0,
        bytes: 0,
        status: 0,
        latency_ns: 0,
        library: name,
        user: if is_nccl { communicators::current() } else { 0 },
        pool: at
            .filter(|_| is_torch_allocator)
            .map_or(0, |(device, stream)| private_pools::current(device, stream)),
        from_torch_allocator: is_torchs,
        unreported: requested_sizes::is_inside_unreported(),
    };
    (Header { clock_ns: 0, api: Some(call.api), device: 0, context, step }, known)
}

/// Converts a status for an event. CUDA's codes are below 1000; a larger value still reads as an error.
fn code(status: c_int) -> i16 {
    i16::try_from(status).unwrap_or(i16::MAX)
}

/// Returns the number of bytes that an allocation node of a CUDA graph allocates at each launch.
///
/// # Safety
/// `node` is null or the caller's own, valid by CUDA's contract.
pub(super) unsafe fn node_bytes(node: *const AllocNodeParams) -> usize {
    // SAFETY: by the contract; the field is a number.
    if node.is_null() { 0 } else { unsafe { (*node).bytesize } }
}

/// Returns the result of adding an allocation node: an address and 0 bytes.
///
/// # Safety
/// The call that made the node succeeded.
pub(super) unsafe fn allocated_node(node: *const AllocNodeParams) -> Allocated {
    if node.is_null() {
        return Allocated::default();
    }
    // SAFETY: a call that succeeded has read the node and written its address. The fields are numbers.
    let (device, address) = unsafe { ((*node).poolProps.location.id, (*node).dptr) };
    Allocated { address, device: i8::try_from(device).ok(), ..Allocated::default() }
}

/// Returns the value that a successful call wrote to `out`.
///
/// # Safety
/// The call that was given `out` succeeded.
unsafe fn written<T: Copy>(out: *const T) -> Option<T> {
    // SAFETY: a successful call has written to `out`. CUDA rejects a null pointer, so the check is only a
    // precaution.
    (!out.is_null()).then(|| unsafe { *out })
}

/// Returns the number of elements in `levels` levels of a mipmapped array. Each side of a level is half as
/// long as in the previous level, but at least 1.
pub(super) fn mipmapped_elements(extent: [usize; 3], levels: c_uint) -> usize {
    let sides = |level: c_uint| extent.map(|side| side.checked_shr(level).unwrap_or(0).max(1));
    let of = |level| sides(level).into_iter().fold(1usize, usize::saturating_mul);
    (0..levels.clamp(1, usize::BITS)).map(of).fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mipmapped_array_has_the_elements_of_all_its_levels() {
        assert_eq!(mipmapped_elements([4, 4, 0], 1), 16);
        assert_eq!(mipmapped_elements([4, 4, 0], 3), 16 + 4 + 1);
        assert_eq!(mipmapped_elements([8, 1, 1], 100), 8 + 4 + 2 + (usize::BITS as usize - 3));
        assert_eq!(mipmapped_elements([2, 2, 2], 0), 8, "one level at least");
    }
}
