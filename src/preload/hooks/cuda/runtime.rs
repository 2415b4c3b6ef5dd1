//! The CUDA runtime's calls that take and give back memory.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use memtrace_trace::Api;

use super::alloc_call::{
    AllocationNode, Call, IpcHandle, Kind, Out, Taken, gives, mipmapped_elements, takes, written,
};
use super::stand_in::{NO_RUNTIME, caller_hooks};
use crate::ffi::cuda::current_device;

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

// No function here is called as one of libc's: a debugger that looks for `malloc` would take it for that.
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
    cudaMalloc3D(ptr: *mut PitchedPtr, extent: Extent) caller "rsi" => malloc_3d, CUDA_MALLOC_3D;
    cudaMallocArray(array: Out, format: *const ChannelFormat, width: usize, height: usize, flags: c_uint) caller "r9" => malloc_array, CUDA_MALLOC_ARRAY;
    cudaMalloc3DArray(array: Out, format: *const ChannelFormat, extent: Extent, flags: c_uint) caller "rcx" => malloc_3d_array, CUDA_MALLOC_3D_ARRAY;
    cudaFreeArray(array: *mut c_void) caller "rsi" => free_array, CUDA_FREE_ARRAY;
    cudaHostAlloc(ptr: Out, size: usize, flags: c_uint) caller "rcx" => host_alloc, CUDA_HOST_ALLOC;
    cudaMallocHost(ptr: Out, size: usize) caller "rdx" => malloc_host, CUDA_MALLOC_HOST;
    cudaFreeHost(ptr: *mut c_void) caller "rsi" => free_host, CUDA_FREE_HOST;
    cudaHostRegister(ptr: *mut c_void, size: usize, flags: c_uint) caller "rcx" => host_register, CUDA_HOST_REGISTER;
    cudaHostUnregister(ptr: *mut c_void) caller "rsi" => host_unregister, CUDA_HOST_UNREGISTER;
    cudaMallocMipmappedArray(array: Out, format: *const ChannelFormat, extent: Extent, levels: c_uint, flags: c_uint) caller "r8" => malloc_mipmapped_array, CUDA_MALLOC_MIPMAPPED_ARRAY;
    cudaFreeMipmappedArray(array: *mut c_void) caller "rsi" => free_mipmapped_array, CUDA_FREE_MIPMAPPED_ARRAY;
    cudaIpcOpenMemHandle(ptr: Out, handle: IpcHandle, flags: c_uint) caller "rdx" => ipc_open, CUDA_IPC_OPEN;
    cudaIpcCloseMemHandle(ptr: *mut c_void) caller "rsi" => ipc_close, CUDA_IPC_CLOSE;
    cudaMemPoolImportPointer(ptr: Out, pool: *mut c_void, exported: *const c_void) caller "rcx" => import_pointer, CUDA_MEM_POOL_IMPORT_POINTER;
    cudaGraphAddMemAllocNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, node: *mut AllocationNode) caller "r9" => alloc_node, CUDA_ALLOC_NODE;
    cudaGraphAddMemFreeNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, ptr: *mut c_void) caller "r9" => free_node, CUDA_FREE_NODE;
}

/// A call of the runtime, whose device is the runtime's.
fn call(kind: Kind, api: Api, caller: *const c_void) -> Call {
    Call { kind, api, caller, device: current_device }
}

/// Calls of the form `f(ptr *, size, rest...)`, and the stream that they are on.
macro_rules! simple_alloc {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*) $(on $stream:ident)?;)*) => { $(
        unsafe extern "C" fn $body(ptr: Out, size: usize, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get() else { return NO_RUNTIME };
            takes(
                call(Kind::$kind, Api::$api, caller),
                size,
                // SAFETY: the caller's own arguments, passed on unchanged.
                || unsafe { real(ptr, size, $($arg),*) },
                // SAFETY: called after a success only.
                || Taken::on([$($stream,)? null_mut()][0], unsafe { written(ptr) }, size),
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

/// Calls of the form `f(ptr, rest...)`.
macro_rules! simple_free {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*);)*) => { $(
        unsafe extern "C" fn $body(ptr: *mut c_void, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get() else { return NO_RUNTIME };
            // SAFETY: the caller's own arguments, passed on unchanged.
            gives(call(Kind::$kind, Api::$api, caller), ptr as u64, 0, || unsafe { real(ptr, $($arg),*) })
        }
    )* };
}

simple_free! {
    cuda_free = CUDA_FREE, DeviceFree, CudaFree();
    free_async = CUDA_FREE_ASYNC, DeviceFree, CudaFreeAsync(stream: *mut c_void);
    free_async_ptsz = CUDA_FREE_ASYNC_PTSZ, DeviceFree, CudaFreeAsync(stream: *mut c_void);
    free_array = CUDA_FREE_ARRAY, DeviceFree, CudaFreeArray();
    free_host = CUDA_FREE_HOST, HostFree, CudaFreeHost();
    host_unregister = CUDA_HOST_UNREGISTER, HostFree, CudaHostUnregister();
    free_mipmapped_array = CUDA_FREE_MIPMAPPED_ARRAY, DeviceFree, CudaFreeMipmappedArray();
    ipc_close = CUDA_IPC_CLOSE, DeviceFree, CudaIpcCloseMemHandle();
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
        call(Kind::DeviceAlloc, Api::CudaMallocPitch, caller),
        width.saturating_mul(height),
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, pitch, width, height) },
        || {
            // SAFETY: called after a success only.
            let (address, pitch) = unsafe { (written(ptr), written(pitch)) };
            Taken::new(address, pitch.unwrap_or(width).saturating_mul(height))
        },
    )
}

unsafe extern "C" fn malloc_3d(ptr: *mut PitchedPtr, extent: Extent, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_MALLOC_3D.get() else { return NO_RUNTIME };
    let rows = extent.height.saturating_mul(extent.depth);
    takes(
        call(Kind::DeviceAlloc, Api::CudaMalloc3D, caller),
        extent.width.saturating_mul(rows),
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, extent) },
        || {
            // SAFETY: called after a success only, so CUDA filled the struct in; null it would refuse.
            let pitched = unsafe { ptr.as_ref() };
            pitched.map_or(Taken::default(), |p| Taken::new(Some(p.ptr), p.pitch.saturating_mul(rows)))
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
        call(Kind::DeviceAlloc, Api::CudaMallocArray, caller),
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, format, width, height, flags) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(array) }, bytes),
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
        call(Kind::DeviceAlloc, Api::CudaMalloc3DArray, caller),
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, format, extent, flags) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(array) }, bytes),
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
        call(Kind::HostAlloc, Api::CudaHostRegister, caller),
        size,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, size, flags) },
        || Taken::new(Some(ptr), size),
    )
}

unsafe extern "C" fn malloc_mipmapped_array(
    array: Out,
    format: *const ChannelFormat,
    extent: Extent,
    levels: c_uint,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MALLOC_MIPMAPPED_ARRAY.get() else { return NO_RUNTIME };
    let elements = mipmapped_elements([extent.width, extent.height, extent.depth], levels);
    // SAFETY: the caller's own pointer.
    let bytes = unsafe { array_bytes(format, elements) };
    takes(
        call(Kind::DeviceAlloc, Api::CudaMallocMipmappedArray, caller),
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, format, extent, levels, flags) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(array) }, bytes),
    )
}

/// Memory of another process costs this one nothing: the process that made it has its bytes.
unsafe extern "C" fn ipc_open(ptr: Out, handle: IpcHandle, flags: c_uint, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_IPC_OPEN.get() else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CudaIpcOpenMemHandle, caller),
        0,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, handle, flags) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(ptr) }, 0),
    )
}

/// As [`ipc_open`], of a pool of another process.
unsafe extern "C" fn import_pointer(
    ptr: Out,
    pool: *mut c_void,
    exported: *const c_void,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MEM_POOL_IMPORT_POINTER.get() else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CudaMemPoolImportPointer, caller),
        0,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, pool, exported) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(ptr) }, 0),
    )
}

/// A node of a graph: see [`Taken::on`].
unsafe extern "C" fn alloc_node(
    out: Out,
    graph: *mut c_void,
    after: *const c_void,
    count: usize,
    node: *mut AllocationNode,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_ALLOC_NODE.get() else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CudaGraphAddMemAllocNode, caller),
        // SAFETY: the caller's own pointer.
        unsafe { AllocationNode::asked(node) },
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(out, graph, after, count, node) },
        // SAFETY: called after a success only.
        || unsafe { AllocationNode::taken(node) },
    )
}

unsafe extern "C" fn free_node(
    out: Out,
    graph: *mut c_void,
    after: *const c_void,
    count: usize,
    ptr: *mut c_void,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_FREE_NODE.get() else { return NO_RUNTIME };
    let call = call(Kind::DeviceFree, Api::CudaGraphAddMemFreeNode, caller);
    // SAFETY: the caller's own arguments, passed on unchanged.
    gives(call, ptr as u64, 0, || unsafe { real(out, graph, after, count, ptr) })
}
