//! Hooks of the calls for CUDA arrays, whose memory has a layout that only the driver knows.

use std::ffi::c_uint;

use crate::ffi::cuda_types::{Array3DDescriptor, ArrayDescriptor, ArrayFormat};
use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks, mipmapped_elements};
use crate::hooks::cuda::driver_fn::{Word, driver_hooks};

driver_hooks! {
    cuArrayCreate_v2 as b"cuArrayCreate" from 3020 (array: Out, shape: *const ArrayDescriptor) caller "rdx" => array_create, ARRAY_CREATE;
    cuArray3DCreate_v2 as b"cuArray3DCreate" from 3020 (array: Out, shape: *const Array3DDescriptor) caller "rdx" => array_3d_create, ARRAY_3D_CREATE;
    cuArrayDestroy as b"cuArrayDestroy" from 2000 (array: Word) caller "rsi" => array_destroy, ARRAY_DESTROY;
    cuMipmappedArrayCreate as b"cuMipmappedArrayCreate" from 5000 (array: Out, shape: *const Array3DDescriptor, levels: c_uint) caller "rcx" => mipmapped_array_create, MIPMAPPED_ARRAY_CREATE;
    cuMipmappedArrayDestroy as b"cuMipmappedArrayDestroy" from 5000 (array: Word) caller "rsi" => mipmapped_array_destroy, MIPMAPPED_ARRAY_DESTROY;
}

alloc_hooks! { driver
    array_create = ARRAY_CREATE, DeviceAlloc, CuArrayCreate(array: Out, shape: *const ArrayDescriptor) requests array_bytes(shape) => |bytes| Allocated::at(array, bytes);
    array_3d_create = ARRAY_3D_CREATE, DeviceAlloc, CuArray3DCreate(array: Out, shape: *const Array3DDescriptor) requests array_3d_bytes(shape, 1) => |bytes| Allocated::at(array, bytes);
    mipmapped_array_create = MIPMAPPED_ARRAY_CREATE, DeviceAlloc, CuMipmappedArrayCreate(array: Out, shape: *const Array3DDescriptor, levels: c_uint) requests array_3d_bytes(shape, levels) => |bytes| Allocated::at(array, bytes);
}

free_hooks! { driver
    array_destroy = ARRAY_DESTROY, DeviceFree, CuArrayDestroy(array: Word) frees array, 0;
    mipmapped_array_destroy = MIPMAPPED_ARRAY_DESTROY, DeviceFree, CuMipmappedArrayDestroy(array: Word) frees array, 0;
}

/// Returns the size in bytes of `elements` elements, without the padding of the driver's layout; 0 for an
/// unsupported format.
fn element_bytes(elements: usize, format: c_uint, channels: c_uint) -> usize {
    use ArrayFormat as F;
    const FORMATS: [(usize, &[ArrayFormat]); 3] = [
        (1, &[F::CU_AD_FORMAT_UNSIGNED_INT8, F::CU_AD_FORMAT_SIGNED_INT8]),
        (2, &[F::CU_AD_FORMAT_UNSIGNED_INT16, F::CU_AD_FORMAT_SIGNED_INT16, F::CU_AD_FORMAT_HALF]),
        (4, &[F::CU_AD_FORMAT_UNSIGNED_INT32, F::CU_AD_FORMAT_SIGNED_INT32, F::CU_AD_FORMAT_FLOAT]),
    ];
    let has_format =
        |(_, formats): &&(usize, &[ArrayFormat])| formats.iter().any(|of| *of as c_uint == format);
    let bytes = FORMATS.iter().find(has_format).map_or(0, |(bytes, _)| *bytes);
    elements.saturating_mul(bytes).saturating_mul(channels as usize)
}

/// Returns the size in bytes of a one- or two-dimensional array.
///
/// # Safety
/// `array` is null or the caller's own, valid by CUDA's contract.
unsafe fn array_bytes(array: *const ArrayDescriptor) -> usize {
    if array.is_null() {
        return 0;
    }
    // SAFETY: by the contract; the format is read as a number.
    let (width, height, format, channels) = unsafe {
        let format = (&raw const (*array).Format).cast::<c_uint>().read();
        ((*array).Width, (*array).Height, format, (*array).NumChannels)
    };
    element_bytes(width.saturating_mul(height.max(1)), format, channels)
}

/// Returns the size in bytes of `levels` levels of an array with up to three dimensions.
///
/// # Safety
/// `array` is null or the caller's own, valid by CUDA's contract.
unsafe fn array_3d_bytes(array: *const Array3DDescriptor, levels: c_uint) -> usize {
    if array.is_null() {
        return 0;
    }
    // SAFETY: by the contract; the format is read as a number.
    let (extent, format, channels) = unsafe {
        let format = (&raw const (*array).Format).cast::<c_uint>().read();
        ([(*array).Width, (*array).Height, (*array).Depth], format, (*array).NumChannels)
    };
    element_bytes(mipmapped_elements(extent, levels), format, channels)
}
