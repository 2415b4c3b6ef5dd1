//! Hooks of the calls that import memory of another process. Imported memory counts as 0 bytes here, because
//! the process that allocated it counts it.

use std::ffi::{c_uint, c_void};

use crate::ffi::cuda_types::DriverIpcHandle;
use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks};
use crate::hooks::cuda::driver_fn::{Word, driver_hooks};

driver_hooks! {
    cuIpcOpenMemHandle_v2 as b"cuIpcOpenMemHandle" from 4010 (ptr: Out, handle: DriverIpcHandle, flags: c_uint) caller "rdx" => ipc_open, IPC_OPEN;
    cuIpcCloseMemHandle as b"cuIpcCloseMemHandle" from 4010 (ptr: Word) caller "rsi" => ipc_close, IPC_CLOSE;
    cuMemPoolImportPointer as b"cuMemPoolImportPointer" from 11020 (ptr: Out, pool: Word, exported: *const c_void) caller "rcx" => import_pointer, IMPORT_POINTER;
}

alloc_hooks! { driver
    ipc_open = IPC_OPEN, DeviceAlloc, CuIpcOpenMemHandle(ptr: Out, handle: DriverIpcHandle, flags: c_uint) requests 0 => |bytes| Allocated::at(ptr, bytes);
    import_pointer = IMPORT_POINTER, DeviceAlloc, CuMemPoolImportPointer(ptr: Out, pool: Word, exported: *const c_void) requests 0 => |bytes| Allocated::at(ptr, bytes);
}

free_hooks! { driver
    ipc_close = IPC_CLOSE, DeviceFree, CuIpcCloseMemHandle(ptr: Word) frees ptr, 0;
}
