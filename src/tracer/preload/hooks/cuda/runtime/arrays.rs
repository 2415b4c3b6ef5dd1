//! Hooks of the calls for CUDA arrays, whose memory has a layout that only the driver knows.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_trace::Api;

use super::call::{call, simple_free};
use crate::ffi::cuda_types::{ChannelFormat, Extent, NOT_INITIALIZED};
use crate::hooks::cuda::alloc_call::{
    Allocated, CallKind, Out, mipmapped_elements, record_alloc, record_free, written,
};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaMallocArray(array: Out, format: *const ChannelFormat, width: usize, height: usize, flags: c_uint) caller "r9" => malloc_array, CUDA_MALLOC_ARRAY;
    cudaMalloc3DArray(array: Out, format: *const ChannelFormat, extent: Extent, flags: c_uint) caller "rcx" => malloc_3d_array, CUDA_MALLOC_3D_ARRAY;
    cudaFreeArray(array: *mut c_void) caller "rsi" => free_array, CUDA_FREE_ARRAY;
    cudaMallocMipmappedArray(array: Out, format: *const ChannelFormat, extent: Extent, levels: c_uint, flags: c_uint) caller "r8" => malloc_mipmapped_array, CUDA_MALLOC_MIPMAPPED_ARRAY;
    cudaFreeMipmappedArray(array: *mut c_void) caller "rsi" => free_mipmapped_array, CUDA_FREE_MIPMAPPED_ARRAY;
}

simple_free! {
    free_array = CUDA_FREE_ARRAY, DeviceFree, CudaFreeArray();
    free_mipmapped_array = CUDA_FREE_MIPMAPPED_ARRAY, DeviceFree, CudaFreeMipmappedArray();
}

/// Returns the size in bytes of an array's elements, without the padding of the driver's layout.
///
/// # Safety
/// `format` is null or the caller's own, valid by CUDA's contract.
unsafe fn array_bytes(format: *const ChannelFormat, elements: usize) -> usize {
    if format.is_null() {
        return 0;
    }
    // SAFETY: by the contract; the fields are numbers.
    let bits = unsafe { [(*format).x, (*format).y, (*format).z, (*format).w] };
    elements.saturating_mul(bits.iter().sum::<c_int>().max(0) as usize / 8)
}

unsafe extern "C" fn malloc_array(
    array: Out,
    format: *const ChannelFormat,
    width: usize,
    height: usize,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MALLOC_ARRAY.get() else { return NOT_INITIALIZED };
    // SAFETY: this is the caller's own pointer.
    let bytes = unsafe { array_bytes(format, width.saturating_mul(height.max(1))) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaMallocArray, caller),
        bytes,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(array, format, width, height, flags) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(array) }, bytes),
    )
}

unsafe extern "C" fn malloc_3d_array(
    array: Out,
    format: *const ChannelFormat,
    extent: Extent,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_MALLOC_3D_ARRAY.get() else { return NOT_INITIALIZED };
    let elements = extent.width.saturating_mul(extent.height.max(1)).saturating_mul(extent.depth.max(1));
    // SAFETY: this is the caller's own pointer.
    let bytes = unsafe { array_bytes(format, elements) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaMalloc3DArray, caller),
        bytes,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(array, format, extent, flags) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(array) }, bytes),
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
    let Some(real) = CUDA_MALLOC_MIPMAPPED_ARRAY.get() else { return NOT_INITIALIZED };
    let elements = mipmapped_elements([extent.width, extent.height, extent.depth], levels);
    // SAFETY: this is the caller's own pointer.
    let bytes = unsafe { array_bytes(format, elements) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaMallocMipmappedArray, caller),
        bytes,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(array, format, extent, levels, flags) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(array) }, bytes),
    )
}
