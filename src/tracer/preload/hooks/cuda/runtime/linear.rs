//! Hooks of the calls for linear device memory and pinned host memory.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use memtrace_trace::Api;

use super::call::{call, simple_free};
use crate::ffi::cuda_types::{Extent, NOT_INITIALIZED, PitchedPointer};
use crate::hooks::cuda::alloc_call::{Allocated, CallKind, Out, record_alloc, record_free, written};
use crate::hooks::cuda::stand_in::caller_hooks;

// The bodies have names such as `cuda_malloc`, because a debugger that looks for the libc function `malloc`
// would find a body named `malloc` instead.
caller_hooks! {
    cudaMalloc(ptr: Out, size: usize) caller "rdx" => cuda_malloc, CUDA_MALLOC;
    cudaFree(ptr: *mut c_void) caller "rsi" => cuda_free, CUDA_FREE;
    cudaMallocAsync(ptr: Out, size: usize, stream: *mut c_void) caller "rcx" => malloc_async, CUDA_MALLOC_ASYNC;
    cudaMallocAsync_ptsz(ptr: Out, size: usize, stream: *mut c_void) caller "rcx" => malloc_async_ptsz, CUDA_MALLOC_ASYNC_PTSZ;
    cudaFreeAsync(ptr: *mut c_void, stream: *mut c_void) caller "rdx" => free_async, CUDA_FREE_ASYNC;
    cudaFreeAsync_ptsz(ptr: *mut c_void, stream: *mut c_void) caller "rdx" => free_async_ptsz, CUDA_FREE_ASYNC_PTSZ;
    cudaMallocFromPoolAsync(ptr: Out, size: usize, pool: *mut c_void, stream: *mut c_void) caller "r8" => malloc_from_pool, CUDA_MALLOC_FROM_POOL;
    cudaMallocFromPoolAsync_ptsz(ptr: Out, size: usize, pool: *mut c_void, stream: *mut c_void) caller "r8" => malloc_from_pool_ptsz, CUDA_MALLOC_FROM_POOL_PTSZ;
    cudaMallocManaged(ptr: Out, size: usize, flags: c_uint) caller "rcx" => malloc_managed, CUDA_MALLOC_MANAGED;
    cudaMallocPitch(ptr: Out, pitch: *mut usize, width: usize, height: usize) caller "r8" => malloc_pitch, CUDA_MALLOC_PITCH;
    cudaMalloc3D(ptr: *mut PitchedPointer, extent: Extent) caller "rsi" => malloc_3d, CUDA_MALLOC_3D;
    cudaHostAlloc(ptr: Out, size: usize, flags: c_uint) caller "rcx" => host_alloc, CUDA_HOST_ALLOC;
    cudaMallocHost(ptr: Out, size: usize) caller "rdx" => malloc_host, CUDA_MALLOC_HOST;
    cudaFreeHost(ptr: *mut c_void) caller "rsi" => free_host, CUDA_FREE_HOST;
    cudaHostRegister(ptr: *mut c_void, size: usize, flags: c_uint) caller "rcx" => host_register, CUDA_HOST_REGISTER;
    cudaHostUnregister(ptr: *mut c_void) caller "rsi" => host_unregister, CUDA_HOST_UNREGISTER;
}

/// Defines hooks of the form `f(ptr *, size, rest...)`, where `on` names the argument that is the stream, if
/// the call has one.
macro_rules! simple_alloc {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*) $(on $stream:ident)?;)*) => { $(
        unsafe extern "C" fn $body(ptr: Out, size: usize, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get() else { return NOT_INITIALIZED };
            record_alloc(
                call(CallKind::$kind, Api::$api, caller),
                size,
                // SAFETY: the caller's arguments are passed on unchanged.
                || unsafe { real(ptr, size, $($arg),*) },
                // SAFETY: this runs only after the call succeeded, so the stream is alive, too.
                || unsafe { Allocated::on([$($stream,)? null_mut()][0], written(ptr), size) },
            )
        }
    )* };
}

simple_alloc! {
    cuda_malloc = CUDA_MALLOC, DeviceAlloc, CudaMalloc();
    malloc_async = CUDA_MALLOC_ASYNC, DeviceAlloc, CudaMallocAsync(stream: *mut c_void) on stream;
    malloc_async_ptsz = CUDA_MALLOC_ASYNC_PTSZ, DeviceAlloc, CudaMallocAsync(stream: *mut c_void) on stream;
    malloc_from_pool = CUDA_MALLOC_FROM_POOL, DeviceAlloc, CudaMallocFromPoolAsync(pool: *mut c_void, stream: *mut c_void) on stream;
    malloc_from_pool_ptsz = CUDA_MALLOC_FROM_POOL_PTSZ, DeviceAlloc, CudaMallocFromPoolAsync(pool: *mut c_void, stream: *mut c_void) on stream;
    malloc_managed = CUDA_MALLOC_MANAGED, DeviceAlloc, CudaMallocManaged(flags: c_uint);
    host_alloc = CUDA_HOST_ALLOC, HostAlloc, CudaHostAlloc(flags: c_uint);
    malloc_host = CUDA_MALLOC_HOST, HostAlloc, CudaMallocHost();
}

simple_free! {
    cuda_free = CUDA_FREE, DeviceFree, CudaFree();
    free_async = CUDA_FREE_ASYNC, DeviceFree, CudaFreeAsync(stream: *mut c_void);
    free_async_ptsz = CUDA_FREE_ASYNC_PTSZ, DeviceFree, CudaFreeAsync(stream: *mut c_void);
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
    let Some(real) = CUDA_MALLOC_PITCH.get() else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaMallocPitch, caller),
        width.saturating_mul(height),
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, pitch, width, height) },
        || {
            // SAFETY: this runs only after the call succeeded.
            let (address, pitch) = unsafe { (written(ptr), written(pitch)) };
            Allocated::new(address, pitch.unwrap_or(width).saturating_mul(height))
        },
    )
}

unsafe extern "C" fn malloc_3d(ptr: *mut PitchedPointer, extent: Extent, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_MALLOC_3D.get() else { return NOT_INITIALIZED };
    let rows = extent.height.saturating_mul(extent.depth);
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaMalloc3D, caller),
        extent.width.saturating_mul(rows),
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, extent) },
        || {
            // SAFETY: this runs only after the call succeeded, so CUDA has filled in the struct. CUDA rejects
            // a null pointer.
            let pitched = unsafe { ptr.as_ref() };
            pitched
                .map_or(Allocated::default(), |p| Allocated::new(Some(p.ptr), p.pitch.saturating_mul(rows)))
        },
    )
}

unsafe extern "C" fn host_register(
    ptr: *mut c_void,
    size: usize,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_HOST_REGISTER.get() else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::HostAlloc, Api::CudaHostRegister, caller),
        size,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, size, flags) },
        || Allocated::new(Some(ptr), size),
    )
}
