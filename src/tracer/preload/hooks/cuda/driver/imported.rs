//! Hooks of the calls that import memory of another process. Imported memory counts as 0 bytes here, because
//! the process that allocated it counts it.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_trace::Api;

use super::call::{Word, call, record_alloc, record_free, simple_free};
use crate::ffi::cuda_types::{DriverIpcHandle, NOT_INITIALIZED};
use crate::hooks::cuda::alloc_call::{Allocated, CallKind, Out, written};
use crate::hooks::cuda::driver_fn::{DriverFn, driver_hooks};

driver_hooks! {
    cuIpcOpenMemHandle_v2 as b"cuIpcOpenMemHandle" from 4010 (ptr: Out, handle: DriverIpcHandle, flags: c_uint) caller "rdx" => ipc_open, IPC_OPEN;
    cuIpcCloseMemHandle as b"cuIpcCloseMemHandle" from 4010 (ptr: Word) caller "rsi" => ipc_close, IPC_CLOSE;
    cuMemPoolImportPointer as b"cuMemPoolImportPointer" from 11020 (ptr: Out, pool: Word, exported: *const c_void) caller "rcx" => import_pointer, IMPORT_POINTER;
}

simple_free! {
    ipc_close = IPC_CLOSE, DeviceFree, CuIpcCloseMemHandle() 0;
}

unsafe extern "C" fn ipc_open<const WAY: usize>(
    ptr: Out,
    handle: DriverIpcHandle,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = IPC_OPEN.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuIpcOpenMemHandle, caller),
        0,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, handle, flags) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(ptr) }, 0),
    )
}

unsafe extern "C" fn import_pointer<const WAY: usize>(
    ptr: Out,
    pool: Word,
    exported: *const c_void,
    caller: *const c_void,
) -> c_int {
    let Some(real) = IMPORT_POINTER.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMemPoolImportPointer, caller),
        0,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, pool, exported) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(ptr) }, 0),
    )
}
