//! Hooks of the calls that import memory of another process. Imported memory counts as 0 bytes here, because
//! the process that allocated it counts it.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_trace::Api;

use super::call::{call, simple_free};
use crate::ffi::cuda_types::{NOT_INITIALIZED, RuntimeIpcHandle};
use crate::hooks::cuda::alloc_call::{Allocated, CallKind, Out, record_alloc, record_free, written};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaIpcOpenMemHandle(ptr: Out, handle: RuntimeIpcHandle, flags: c_uint) caller "rdx" => ipc_open, CUDA_IPC_OPEN;
    cudaIpcCloseMemHandle(ptr: *mut c_void) caller "rsi" => ipc_close, CUDA_IPC_CLOSE;
    cudaMemPoolImportPointer(ptr: Out, pool: *mut c_void, exported: *const c_void) caller "rcx" => import_pointer, CUDA_MEM_POOL_IMPORT_POINTER;
}

simple_free! {
    ipc_close = CUDA_IPC_CLOSE, DeviceFree, CudaIpcCloseMemHandle();
}

unsafe extern "C" fn ipc_open(
    ptr: Out,
    handle: RuntimeIpcHandle,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_IPC_OPEN.get() else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaIpcOpenMemHandle, caller),
        0,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, handle, flags) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(ptr) }, 0),
    )
}

unsafe extern "C" fn import_pointer(
    ptr: Out,
    pool: *mut c_void,
    exported: *const c_void,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MEM_POOL_IMPORT_POINTER.get() else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaMemPoolImportPointer, caller),
        0,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, pool, exported) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(ptr) }, 0),
    )
}
