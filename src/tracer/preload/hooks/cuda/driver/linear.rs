//! Hooks of the calls for linear device memory and pinned host memory.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use memtrace_trace::Api;

use super::call::{Word, call, record_alloc, record_free, simple_free};
use crate::ffi::cuda_types::NOT_INITIALIZED;
use crate::hooks::cuda::alloc_call::{Allocated, CallKind, Out, written};
use crate::hooks::cuda::driver_fn::{DriverFn, driver_hooks};

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

/// Defines hooks of the form `f(ptr *, size, rest...)`, where `on` names the argument that is the stream, if
/// the call has one.
macro_rules! simple_alloc {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*) $(on $stream:ident)?;)*) => { $(
        unsafe extern "C" fn $body<const WAY: usize>(ptr: Out, size: usize, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get(WAY) else { return NOT_INITIALIZED };
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
    mem_alloc = ALLOC, DeviceAlloc, CuMemAlloc();
    alloc_managed = ALLOC_MANAGED, DeviceAlloc, CuMemAllocManaged(flags: c_uint);
    alloc_async = ALLOC_ASYNC, DeviceAlloc, CuMemAllocAsync(stream: Word) on stream;
    alloc_async_ptsz = ALLOC_ASYNC_PTSZ, DeviceAlloc, CuMemAllocAsync(stream: Word) on stream;
    alloc_from_pool = ALLOC_FROM_POOL, DeviceAlloc, CuMemAllocFromPoolAsync(pool: Word, stream: Word) on stream;
    alloc_from_pool_ptsz = ALLOC_FROM_POOL_PTSZ, DeviceAlloc, CuMemAllocFromPoolAsync(pool: Word, stream: Word) on stream;
    host_alloc = HOST_ALLOC, HostAlloc, CuMemHostAlloc(flags: c_uint);
    alloc_host = ALLOC_HOST, HostAlloc, CuMemAllocHost();
}

simple_free! {
    mem_free = FREE, DeviceFree, CuMemFree() 0;
    free_async = FREE_ASYNC, DeviceFree, CuMemFreeAsync(stream: Word) 0;
    free_async_ptsz = FREE_ASYNC_PTSZ, DeviceFree, CuMemFreeAsync(stream: Word) 0;
    free_host = FREE_HOST, HostFree, CuMemFreeHost() 0;
    host_unregister = HOST_UNREGISTER, HostFree, CuMemHostUnregister() 0;
}

unsafe extern "C" fn alloc_pitch<const WAY: usize>(
    ptr: Out,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ALLOC_PITCH.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMemAllocPitch, caller),
        width.saturating_mul(height),
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, pitch, width, height, element) },
        || {
            // SAFETY: this runs only after the call succeeded.
            let (address, pitch) = unsafe { (written(ptr), written(pitch)) };
            Allocated::new(address, pitch.unwrap_or(width).saturating_mul(height))
        },
    )
}

unsafe extern "C" fn host_register<const WAY: usize>(
    ptr: Word,
    size: usize,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = HOST_REGISTER.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::HostAlloc, Api::CuMemHostRegister, caller),
        size,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, size, flags) },
        || Allocated::new(Some(ptr), size),
    )
}
