//! Hooks of the calls for CUDA arrays, whose memory has a layout that only the driver knows.

use std::ffi::{c_int, c_uint, c_void};

use memtrace_trace::Api;

use super::call::{Word, call, record_alloc, record_free, simple_free};
use crate::ffi::cuda_types::{Array3DDescriptor, ArrayDescriptor, ArrayFormat, NOT_INITIALIZED};
use crate::hooks::cuda::alloc_call::{Allocated, CallKind, Out, mipmapped_elements, written};
use crate::hooks::cuda::driver_fn::{DriverFn, driver_hooks};

driver_hooks! {
    cuArrayCreate_v2 as b"cuArrayCreate" from 3020 (array: Out, shape: *const ArrayDescriptor) caller "rdx" => array_create, ARRAY_CREATE;
    cuArray3DCreate_v2 as b"cuArray3DCreate" from 3020 (array: Out, shape: *const Array3DDescriptor) caller "rdx" => array_3d_create, ARRAY_3D_CREATE;
    cuArrayDestroy as b"cuArrayDestroy" from 2000 (array: Word) caller "rsi" => array_destroy, ARRAY_DESTROY;
    cuMipmappedArrayCreate as b"cuMipmappedArrayCreate" from 5000 (array: Out, shape: *const Array3DDescriptor, levels: c_uint) caller "rcx" => mipmapped_array_create, MIPMAPPED_ARRAY_CREATE;
    cuMipmappedArrayDestroy as b"cuMipmappedArrayDestroy" from 5000 (array: Word) caller "rsi" => mipmapped_array_destroy, MIPMAPPED_ARRAY_DESTROY;
}

simple_free! {
    array_destroy = ARRAY_DESTROY, DeviceFree, CuArrayDestroy() 0;
    mipmapped_array_destroy = MIPMAPPED_ARRAY_DESTROY, DeviceFree, CuMipmappedArrayDestroy() 0;
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

unsafe extern "C" fn array_create<const WAY: usize>(
    array: Out,
    shape: *const ArrayDescriptor,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ARRAY_CREATE.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: this is the caller's own pointer.
    let bytes = unsafe { array_bytes(shape) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuArrayCreate, caller),
        bytes,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(array, shape) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(array) }, bytes),
    )
}

unsafe extern "C" fn array_3d_create<const WAY: usize>(
    array: Out,
    shape: *const Array3DDescriptor,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ARRAY_3D_CREATE.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: this is the caller's own pointer.
    let bytes = unsafe { array_3d_bytes(shape, 1) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuArray3DCreate, caller),
        bytes,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(array, shape) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(array) }, bytes),
    )
}

unsafe extern "C" fn mipmapped_array_create<const WAY: usize>(
    array: Out,
    shape: *const Array3DDescriptor,
    levels: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = MIPMAPPED_ARRAY_CREATE.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: this is the caller's own pointer.
    let bytes = unsafe { array_3d_bytes(shape, levels) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMipmappedArrayCreate, caller),
        bytes,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(array, shape, levels) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(array) }, bytes),
    )
}
