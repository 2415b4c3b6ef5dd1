//! Hooks of the calls that import memory of another process. Imported memory counts as 0 bytes here, because
//! the process that allocated it counts it.

use std::ffi::{c_uint, c_void};

use crate::ffi::cuda_types::RuntimeIpcHandle;
use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaIpcOpenMemHandle(ptr: Out, handle: RuntimeIpcHandle, flags: c_uint) caller "rdx" => ipc_open, CUDA_IPC_OPEN;
    cudaIpcCloseMemHandle(ptr: *mut c_void) caller "rsi" => ipc_close, CUDA_IPC_CLOSE;
    cudaMemPoolImportPointer(ptr: Out, pool: *mut c_void, exported: *const c_void) caller "rcx" => import_pointer, CUDA_MEM_POOL_IMPORT_POINTER;
}

alloc_hooks! { runtime
    ipc_open = CUDA_IPC_OPEN, DeviceAlloc, CudaIpcOpenMemHandle(ptr: Out, handle: RuntimeIpcHandle, flags: c_uint) requests 0 => |bytes| Allocated::at(ptr, bytes);
    import_pointer = CUDA_MEM_POOL_IMPORT_POINTER, DeviceAlloc, CudaMemPoolImportPointer(ptr: Out, pool: *mut c_void, exported: *const c_void) requests 0 => |bytes| Allocated::at(ptr, bytes);
}

free_hooks! { runtime
    ipc_close = CUDA_IPC_CLOSE, DeviceFree, CudaIpcCloseMemHandle(ptr: *mut c_void) frees ptr, 0;
}
