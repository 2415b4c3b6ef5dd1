//! The CUDA runtime's calls that take and give back memory.
//!
//! An allocation is recorded after the call, when its outcome is known; a free is announced before it,
//! so that nobody who is given the same address meanwhile stands before it in the trace.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_record::Recorder;
use memtrace_record::clock::now_ns;
use memtrace_trace::{Api, Event, Kind};

use super::NO_RUNTIME;
use crate::callers::{Library, library_at};
use crate::context;
use crate::device::current_device;
use crate::guard::{Outermost, shielded};
use crate::{init, pools, requested};

type Out = *mut *mut c_void;

/// `cudaExtent` and `cudaPitchedPtr`, as the runtime's headers lay them out.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extent {
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
struct PitchedPtr {
    ptr: *mut c_void,
    pitch: usize,
    xsize: usize,
    ysize: usize,
}

/// `cudaChannelFormatDesc`: bits of each channel.
#[repr(C)]
struct ChannelFormat {
    bits: [c_int; 4],
    kind: c_int,
}

super::caller_hooks! {
    cudaMalloc(ptr: Out, size: usize) caller "rdx" => malloc, CUDA_MALLOC;
    cudaFree(ptr: *mut c_void) caller "rsi" => free, CUDA_FREE;
    cudaMallocAsync(ptr: Out, size: usize, stream: *mut c_void) caller "rcx" => malloc_async, CUDA_MALLOC_ASYNC;
    cudaMallocAsync_ptsz(ptr: Out, size: usize, stream: *mut c_void) caller "rcx" => malloc_async_ptsz, CUDA_MALLOC_ASYNC_PTSZ;
    cudaFreeAsync(ptr: *mut c_void, stream: *mut c_void) caller "rdx" => free_async, CUDA_FREE_ASYNC;
    cudaFreeAsync_ptsz(ptr: *mut c_void, stream: *mut c_void) caller "rdx" => free_async_ptsz, CUDA_FREE_ASYNC_PTSZ;
    cudaMallocFromPoolAsync(ptr: Out, size: usize, pool: *mut c_void, stream: *mut c_void) caller "r8" => malloc_from_pool, CUDA_MALLOC_FROM_POOL;
    cudaMallocFromPoolAsync_ptsz(ptr: Out, size: usize, pool: *mut c_void, stream: *mut c_void) caller "r8" => malloc_from_pool_ptsz, CUDA_MALLOC_FROM_POOL_PTSZ;
    cudaMallocManaged(ptr: Out, size: usize, flags: c_uint) caller "rcx" => malloc_managed, CUDA_MALLOC_MANAGED;
    cudaMallocPitch(ptr: Out, pitch: *mut usize, width: usize, height: usize) caller "r8" => malloc_pitch, CUDA_MALLOC_PITCH;
    cudaMalloc3D(ptr: *mut PitchedPtr, extent: Extent) caller "rsi" => malloc_3d, CUDA_MALLOC_3D;
    cudaMallocArray(array: Out, format: *const ChannelFormat, width: usize, height: usize, flags: c_uint) caller "r9" => malloc_array, CUDA_MALLOC_ARRAY;
    cudaMalloc3DArray(array: Out, format: *const ChannelFormat, extent: Extent, flags: c_uint) caller "rcx" => malloc_3d_array, CUDA_MALLOC_3D_ARRAY;
    cudaFreeArray(array: *mut c_void) caller "rsi" => free_array, CUDA_FREE_ARRAY;
    cudaHostAlloc(ptr: Out, size: usize, flags: c_uint) caller "rcx" => host_alloc, CUDA_HOST_ALLOC;
    cudaMallocHost(ptr: Out, size: usize) caller "rdx" => malloc_host, CUDA_MALLOC_HOST;
    cudaFreeHost(ptr: *mut c_void) caller "rsi" => free_host, CUDA_FREE_HOST;
    cudaHostRegister(ptr: *mut c_void, size: usize, flags: c_uint) caller "rcx" => host_register, CUDA_HOST_REGISTER;
    cudaHostUnregister(ptr: *mut c_void) caller "rsi" => host_unregister, CUDA_HOST_UNREGISTER;
}

/// A call that takes memory: `call` runs it, `taken` reads address and bytes after a success.
fn takes(
    kind: Kind,
    api: Api,
    caller: *const c_void,
    asked: usize,
    call: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> (u64, usize),
) -> c_int {
    let Some(_outermost) = Outermost::enter() else { return call() };
    // Before the clock: the first call of a process starts the recorder.
    let recorder = shielded(init::recorder).flatten();
    let before = now_ns();
    let status = call();
    shielded(|| {
        let Some(recorder) = recorder else { return };
        let (addr, bytes) = if status == 0 { taken() } else { (0, asked) };
        let device = if kind == Kind::HostAlloc { Event::HOST } else { current_device() };
        let event = call_event(kind, api, caller);
        recorder.record(|clock_ns| Event {
            clock_ns,
            device,
            status: code(status),
            addr,
            size: bytes as i64,
            extra: clock_ns.saturating_sub(before) as i64,
            ..event
        });
    });
    status
}

/// A call that gives memory back.
fn gives(
    kind: Kind,
    api: Api,
    caller: *const c_void,
    addr: *mut c_void,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // `cudaFree(0)` is how programs initialize the runtime.
    if addr.is_null() {
        return call();
    }
    let Some(_outermost) = Outermost::enter() else { return call() };
    // What was never seen to be taken is not worth a trace of its own.
    let announced = Recorder::active().and_then(|recorder| {
        shielded(|| {
            let event = call_event(kind, api, caller);
            (recorder, Event { clock_ns: recorder.begin(), ..event })
        })
    });
    let status = call();
    if let Some((recorder, event)) = announced {
        shielded(|| {
            recorder.commit(Event {
                device: if kind == Kind::HostFree { Event::HOST } else { Event::UNKNOWN_DEVICE },
                status: code(status),
                addr: addr as u64,
                extra: now_ns().saturating_sub(event.clock_ns) as i64,
                ..event
            });
        });
    }
    status
}

/// The part of a call's event that is known before its outcome.
fn call_event(kind: Kind, api: Api, caller: *const c_void) -> Event {
    let Library { name, is_torch_allocator } = library_at(caller);
    let (context, step) = context::current();
    Event {
        kind: kind as u8,
        api: api as u8,
        flags: if is_torch_allocator || requested::is_inside() { Event::FROM_TORCH_ALLOCATOR } else { 0 },
        reserved: u64::from(name),
        source: if is_torch_allocator { pools::current() } else { 0 },
        context,
        step,
        ..Event::default()
    }
}

/// CUDA's codes are below 1000; one that is not is still an error.
fn code(status: c_int) -> i16 {
    i16::try_from(status).unwrap_or(i16::MAX)
}

/// What a successful call wrote through `out`.
///
/// # Safety
/// The call that was given `out` succeeded.
unsafe fn written<T: Copy>(out: *const T) -> Option<T> {
    // SAFETY: CUDA fails on a null place and writes any other; the check costs nothing.
    (!out.is_null()).then(|| unsafe { *out })
}

/// Calls of the form `f(ptr *, size, rest...)`.
macro_rules! simple_alloc {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*);)*) => { $(
        unsafe extern "C" fn $body(ptr: Out, size: usize, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get() else { return NO_RUNTIME };
            takes(
                Kind::$kind,
                Api::$api,
                caller,
                size,
                // SAFETY: the caller's own arguments, passed on unchanged.
                || unsafe { real(ptr, size, $($arg),*) },
                // SAFETY: called after a success only.
                || (unsafe { written(ptr) }.map_or(0, |address| address as u64), size),
            )
        }
    )* };
}

simple_alloc! {
    malloc = CUDA_MALLOC, DeviceAlloc, CudaMalloc();
    malloc_async = CUDA_MALLOC_ASYNC, DeviceAlloc, CudaMallocAsync(stream: *mut c_void);
    malloc_async_ptsz = CUDA_MALLOC_ASYNC_PTSZ, DeviceAlloc, CudaMallocAsync(stream: *mut c_void);
    malloc_from_pool = CUDA_MALLOC_FROM_POOL, DeviceAlloc, CudaMallocFromPoolAsync(pool: *mut c_void, stream: *mut c_void);
    malloc_from_pool_ptsz = CUDA_MALLOC_FROM_POOL_PTSZ, DeviceAlloc, CudaMallocFromPoolAsync(pool: *mut c_void, stream: *mut c_void);
    malloc_managed = CUDA_MALLOC_MANAGED, DeviceAlloc, CudaMallocManaged(flags: c_uint);
    host_alloc = CUDA_HOST_ALLOC, HostAlloc, CudaHostAlloc(flags: c_uint);
    malloc_host = CUDA_MALLOC_HOST, HostAlloc, CudaMallocHost();
}

/// Calls of the form `f(ptr, rest...)`.
macro_rules! simple_free {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*);)*) => { $(
        unsafe extern "C" fn $body(ptr: *mut c_void, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get() else { return NO_RUNTIME };
            // SAFETY: the caller's own arguments, passed on unchanged.
            gives(Kind::$kind, Api::$api, caller, ptr, || unsafe { real(ptr, $($arg),*) })
        }
    )* };
}

simple_free! {
    free = CUDA_FREE, DeviceFree, CudaFree();
    free_async = CUDA_FREE_ASYNC, DeviceFree, CudaFreeAsync(stream: *mut c_void);
    free_async_ptsz = CUDA_FREE_ASYNC_PTSZ, DeviceFree, CudaFreeAsync(stream: *mut c_void);
    free_array = CUDA_FREE_ARRAY, DeviceFree, CudaFreeArray();
    free_host = CUDA_FREE_HOST, HostFree, CudaFreeHost();
    host_unregister = CUDA_HOST_UNREGISTER, HostFree, CudaHostUnregister();
}

unsafe extern "C" fn malloc_pitch(
    ptr: Out,
    pitch: *mut usize,
    width: usize,
    height: usize,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MALLOC_PITCH.get() else { return NO_RUNTIME };
    takes(
        Kind::DeviceAlloc,
        Api::CudaMallocPitch,
        caller,
        width.saturating_mul(height),
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, pitch, width, height) },
        || {
            // SAFETY: called after a success only.
            let (address, pitch) = unsafe { (written(ptr), written(pitch)) };
            (address.map_or(0, |address| address as u64), pitch.unwrap_or(width).saturating_mul(height))
        },
    )
}

unsafe extern "C" fn malloc_3d(ptr: *mut PitchedPtr, extent: Extent, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_MALLOC_3D.get() else { return NO_RUNTIME };
    let rows = extent.height.saturating_mul(extent.depth);
    takes(
        Kind::DeviceAlloc,
        Api::CudaMalloc3D,
        caller,
        extent.width.saturating_mul(rows),
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, extent) },
        || {
            // SAFETY: called after a success only, so CUDA filled the struct in; null it would refuse.
            let pitched = unsafe { ptr.as_ref() };
            pitched.map_or((0, 0), |p| (p.ptr as u64, p.pitch.saturating_mul(rows)))
        },
    )
}

/// Bytes of an array's elements; its layout, and what it takes with its padding, is the driver's own.
unsafe fn array_bytes(format: *const ChannelFormat, elements: usize) -> usize {
    // SAFETY: the caller's pointer, valid or null by CUDA's contract.
    let bits = unsafe { format.as_ref() }.map_or(0, |format| format.bits.iter().sum::<c_int>());
    elements.saturating_mul(bits.max(0) as usize / 8)
}

unsafe extern "C" fn malloc_array(
    array: Out,
    format: *const ChannelFormat,
    width: usize,
    height: usize,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MALLOC_ARRAY.get() else { return NO_RUNTIME };
    // SAFETY: the caller's own pointer.
    let bytes = unsafe { array_bytes(format, width.saturating_mul(height.max(1))) };
    takes(
        Kind::DeviceAlloc,
        Api::CudaMallocArray,
        caller,
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, format, width, height, flags) },
        // SAFETY: called after a success only.
        || (unsafe { written(array) }.map_or(0, |handle| handle as u64), bytes),
    )
}

unsafe extern "C" fn malloc_3d_array(
    array: Out,
    format: *const ChannelFormat,
    extent: Extent,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MALLOC_3D_ARRAY.get() else { return NO_RUNTIME };
    let elements = extent.width.saturating_mul(extent.height.max(1)).saturating_mul(extent.depth.max(1));
    // SAFETY: the caller's own pointer.
    let bytes = unsafe { array_bytes(format, elements) };
    takes(
        Kind::DeviceAlloc,
        Api::CudaMalloc3DArray,
        caller,
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, format, extent, flags) },
        // SAFETY: called after a success only.
        || (unsafe { written(array) }.map_or(0, |handle| handle as u64), bytes),
    )
}

unsafe extern "C" fn host_register(
    ptr: *mut c_void,
    size: usize,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_HOST_REGISTER.get() else { return NO_RUNTIME };
    takes(
        Kind::HostAlloc,
        Api::CudaHostRegister,
        caller,
        size,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, size, flags) },
        || (ptr as u64, size),
    )
}
