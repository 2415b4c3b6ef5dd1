//! Hooks of the calls for CUDA arrays, whose memory has a layout that only the driver knows.

use std::ffi::{c_int, c_uint, c_void};

use crate::ffi::cuda_types::{ChannelFormat, Extent};
use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks, mipmapped_elements};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaMallocArray(array: Out, format: *const ChannelFormat, width: usize, height: usize, flags: c_uint) caller "r9" => malloc_array, CUDA_MALLOC_ARRAY;
    cudaMalloc3DArray(array: Out, format: *const ChannelFormat, extent: Extent, flags: c_uint) caller "rcx" => malloc_3d_array, CUDA_MALLOC_3D_ARRAY;
    cudaFreeArray(array: *mut c_void) caller "rsi" => free_array, CUDA_FREE_ARRAY;
    cudaMallocMipmappedArray(array: Out, format: *const ChannelFormat, extent: Extent, levels: c_uint, flags: c_uint) caller "r8" => malloc_mipmapped_array, CUDA_MALLOC_MIPMAPPED_ARRAY;
    cudaFreeMipmappedArray(array: *mut c_void) caller "rsi" => free_mipmapped_array, CUDA_FREE_MIPMAPPED_ARRAY;
}

alloc_hooks! { runtime
    malloc_array = CUDA_MALLOC_ARRAY, DeviceAlloc, CudaMallocArray(array: Out, format: *const ChannelFormat, width: usize, height: usize, flags: c_uint) requests array_bytes(format, width.saturating_mul(height.max(1))) => |bytes| Allocated::at(array, bytes);
    malloc_3d_array = CUDA_MALLOC_3D_ARRAY, DeviceAlloc, CudaMalloc3DArray(array: Out, format: *const ChannelFormat, extent: Extent, flags: c_uint) requests array_bytes(format, extent.width.saturating_mul(extent.height.max(1)).saturating_mul(extent.depth.max(1))) => |bytes| Allocated::at(array, bytes);
    malloc_mipmapped_array = CUDA_MALLOC_MIPMAPPED_ARRAY, DeviceAlloc, CudaMallocMipmappedArray(array: Out, format: *const ChannelFormat, extent: Extent, levels: c_uint, flags: c_uint) requests array_bytes(format, mipmapped_elements([extent.width, extent.height, extent.depth], levels)) => |bytes| Allocated::at(array, bytes);
}

free_hooks! { runtime
    free_array = CUDA_FREE_ARRAY, DeviceFree, CudaFreeArray(array: *mut c_void) frees array, 0;
    free_mipmapped_array = CUDA_FREE_MIPMAPPED_ARRAY, DeviceFree, CudaFreeMipmappedArray(array: *mut c_void) frees array, 0;
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
