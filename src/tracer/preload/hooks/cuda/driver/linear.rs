//! Hooks of the calls for linear device memory and pinned host memory.

use std::ffi::c_uint;
use std::ptr::null_mut;

use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks};
use crate::hooks::cuda::driver_fn::{Word, driver_hooks};

driver_hooks! {
    cuMemAlloc_v2 as b"cuMemAlloc" from 3020 (ptr: Out, size: usize) caller "rdx" => mem_alloc, ALLOC;
    cuMemAllocManaged as b"cuMemAllocManaged" from 6000 (ptr: Out, size: usize, flags: c_uint) caller "rcx" => alloc_managed, ALLOC_MANAGED;
    cuMemAllocPitch_v2 as b"cuMemAllocPitch" from 3020 (ptr: Out, pitch: *mut usize, width: usize, height: usize, element: c_uint) caller "r9" => alloc_pitch, ALLOC_PITCH;
    cuMemAllocAsync as b"cuMemAllocAsync" from 11020 (ptr: Out, size: usize, stream: Word) caller "rcx" => alloc_async, ALLOC_ASYNC;
    cuMemAllocAsync_ptsz as b"" from 0 (ptr: Out, size: usize, stream: Word) caller "rcx" => alloc_async_ptsz, ALLOC_ASYNC_PTSZ;
    cuMemAllocFromPoolAsync as b"cuMemAllocFromPoolAsync" from 11020 (ptr: Out, size: usize, pool: Word, stream: Word) caller "r8" => alloc_from_pool, ALLOC_FROM_POOL;
    cuMemAllocFromPoolAsync_ptsz as b"" from 0 (ptr: Out, size: usize, pool: Word, stream: Word) caller "r8" => alloc_from_pool_ptsz, ALLOC_FROM_POOL_PTSZ;
    cuMemFree_v2 as b"cuMemFree" from 3020 (ptr: Word) caller "rsi" => mem_free, FREE;
    cuMemFreeAsync as b"cuMemFreeAsync" from 11020 (ptr: Word, stream: Word) caller "rdx" => free_async, FREE_ASYNC;
    cuMemFreeAsync_ptsz as b"" from 0 (ptr: Word, stream: Word) caller "rdx" => free_async_ptsz, FREE_ASYNC_PTSZ;
    cuMemHostAlloc as b"cuMemHostAlloc" from 2020 (ptr: Out, size: usize, flags: c_uint) caller "rcx" => host_alloc, HOST_ALLOC;
    cuMemAllocHost_v2 as b"cuMemAllocHost" from 3020 (ptr: Out, size: usize) caller "rdx" => alloc_host, ALLOC_HOST;
    cuMemFreeHost as b"cuMemFreeHost" from 2000 (ptr: Word) caller "rsi" => free_host, FREE_HOST;
    cuMemHostRegister_v2 as b"cuMemHostRegister" from 6050 (ptr: Word, size: usize, flags: c_uint) caller "rcx" => host_register, HOST_REGISTER;
    cuMemHostUnregister as b"cuMemHostUnregister" from 4000 (ptr: Word) caller "rsi" => host_unregister, HOST_UNREGISTER;
}

alloc_hooks! { driver
    mem_alloc = ALLOC, DeviceAlloc, CuMemAlloc(ptr: Out, size: usize) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    alloc_managed = ALLOC_MANAGED, DeviceAlloc, CuMemAllocManaged(ptr: Out, size: usize, flags: c_uint) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    alloc_async = ALLOC_ASYNC, DeviceAlloc, CuMemAllocAsync(ptr: Out, size: usize, stream: Word) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    alloc_async_ptsz = ALLOC_ASYNC_PTSZ, DeviceAlloc, CuMemAllocAsync(ptr: Out, size: usize, stream: Word) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    alloc_from_pool = ALLOC_FROM_POOL, DeviceAlloc, CuMemAllocFromPoolAsync(ptr: Out, size: usize, pool: Word, stream: Word) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    alloc_from_pool_ptsz = ALLOC_FROM_POOL_PTSZ, DeviceAlloc, CuMemAllocFromPoolAsync(ptr: Out, size: usize, pool: Word, stream: Word) requests size => |bytes| Allocated::on(stream, ptr, bytes);
    host_alloc = HOST_ALLOC, HostAlloc, CuMemHostAlloc(ptr: Out, size: usize, flags: c_uint) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    alloc_host = ALLOC_HOST, HostAlloc, CuMemAllocHost(ptr: Out, size: usize) requests size => |bytes| Allocated::on(null_mut(), ptr, bytes);
    host_register = HOST_REGISTER, HostAlloc, CuMemHostRegister(ptr: Word, size: usize, flags: c_uint) requests size => |bytes| Allocated::new(Some(ptr), bytes);
    alloc_pitch = ALLOC_PITCH, DeviceAlloc, CuMemAllocPitch(ptr: Out, pitch: *mut usize, width: usize, height: usize, element: c_uint) requests width.saturating_mul(height) => |bytes| Allocated::rows(ptr, pitch, width, height);
}

free_hooks! { driver
    mem_free = FREE, DeviceFree, CuMemFree(ptr: Word) frees ptr, 0;
    free_async = FREE_ASYNC, DeviceFree, CuMemFreeAsync(ptr: Word, stream: Word) frees ptr, 0;
    free_async_ptsz = FREE_ASYNC_PTSZ, DeviceFree, CuMemFreeAsync(ptr: Word, stream: Word) frees ptr, 0;
    free_host = FREE_HOST, HostFree, CuMemFreeHost(ptr: Word) frees ptr, 0;
    host_unregister = HOST_UNREGISTER, HostFree, CuMemHostUnregister(ptr: Word) frees ptr, 0;
}
