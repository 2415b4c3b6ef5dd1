//! Hooks of the calls for linear device memory and pinned host memory.

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;

use crate::ffi::cuda_types::{Extent, PitchedPointer};
use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks};
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

alloc_hooks! { runtime
    cuda_malloc = CUDA_MALLOC, DeviceAlloc, CudaMalloc(ptr: Out, size: usize) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    malloc_async = CUDA_MALLOC_ASYNC, DeviceAlloc, CudaMallocAsync(ptr: Out, size: usize, stream: *mut c_void) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    malloc_async_ptsz = CUDA_MALLOC_ASYNC_PTSZ, DeviceAlloc, CudaMallocAsync(ptr: Out, size: usize, stream: *mut c_void) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    malloc_from_pool = CUDA_MALLOC_FROM_POOL, DeviceAlloc, CudaMallocFromPoolAsync(ptr: Out, size: usize, pool: *mut c_void, stream: *mut c_void) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    malloc_from_pool_ptsz = CUDA_MALLOC_FROM_POOL_PTSZ, DeviceAlloc, CudaMallocFromPoolAsync(ptr: Out, size: usize, pool: *mut c_void, stream: *mut c_void) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    malloc_managed = CUDA_MALLOC_MANAGED, DeviceAlloc, CudaMallocManaged(ptr: Out, size: usize, flags: c_uint) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    host_alloc = CUDA_HOST_ALLOC, HostAlloc, CudaHostAlloc(ptr: Out, size: usize, flags: c_uint) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    malloc_host = CUDA_MALLOC_HOST, HostAlloc, CudaMallocHost(ptr: Out, size: usize) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    host_register = CUDA_HOST_REGISTER, HostAlloc, CudaHostRegister(ptr: *mut c_void, size: usize, flags: c_uint) requests size => |bytes| Allocated::new(Some(ptr), bytes);
    malloc_pitch = CUDA_MALLOC_PITCH, DeviceAlloc, CudaMallocPitch(ptr: Out, pitch: *mut usize, width: usize, height: usize) requests width.saturating_mul(height) => |bytes| Allocated::rows(ptr, pitch, width, height);
    malloc_3d = CUDA_MALLOC_3D, DeviceAlloc, CudaMalloc3D(ptr: *mut PitchedPointer, extent: Extent) requests extent.width.saturating_mul(rows_of(extent)) => |bytes| pitched(ptr, rows_of(extent));
}

free_hooks! { runtime
    cuda_free = CUDA_FREE, DeviceFree, CudaFree(ptr: *mut c_void) frees ptr, 0;
    free_async = CUDA_FREE_ASYNC, DeviceFree, CudaFreeAsync(ptr: *mut c_void, stream: *mut c_void) frees ptr, 0;
    free_async_ptsz = CUDA_FREE_ASYNC_PTSZ, DeviceFree, CudaFreeAsync(ptr: *mut c_void, stream: *mut c_void) frees ptr, 0;
    free_host = CUDA_FREE_HOST, HostFree, CudaFreeHost(ptr: *mut c_void) frees ptr, 0;
    host_unregister = CUDA_HOST_UNREGISTER, HostFree, CudaHostUnregister(ptr: *mut c_void) frees ptr, 0;
}

/// Returns the number of rows of an extent.
fn rows_of(extent: Extent) -> usize {
    extent.height.saturating_mul(extent.depth)
}

/// Returns an allocation of `rows` rows, whose address and distance a call wrote to `out`.
///
/// # Safety
/// The call that was given `out` succeeded.
unsafe fn pitched(out: *const PitchedPointer, rows: usize) -> Allocated {
    // SAFETY: by the contract, CUDA has filled in the struct. CUDA rejects a null pointer.
    let pitched = unsafe { out.as_ref() };
    pitched.map_or(Allocated::default(), |at| Allocated::new(Some(at.ptr), at.pitch.saturating_mul(rows)))
}
